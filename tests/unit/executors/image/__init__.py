"""Tests of `autockpt/executors/image`."""
