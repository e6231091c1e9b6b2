"""Tests of `autockpt/cli/planning`."""
