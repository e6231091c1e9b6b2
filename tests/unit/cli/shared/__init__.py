"""Tests of `autockpt/cli/shared`."""
