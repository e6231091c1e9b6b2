"""Tests of `autockpt/tuner/simulation`."""
