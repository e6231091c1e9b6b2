"""Tests of `autockpt/profiles/probes/windows`."""
