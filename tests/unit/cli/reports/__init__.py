"""Tests of `autockpt/cli/reports`."""
