"""Tests of `autockpt/cli/jobs`."""
