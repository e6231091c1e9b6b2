"""Tests of `autockpt/tuner/online`."""
