"""Tests of `autockpt/executors/restore`."""
