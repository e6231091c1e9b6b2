"""Tests of `autockpt/cli/failures`."""
