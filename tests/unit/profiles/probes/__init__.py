"""Tests of `autockpt/profiles/probes`."""
