"""Tests of `autockpt/executors/storage/remote`."""
