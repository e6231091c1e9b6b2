"""Tests of `autockpt/executors/throttle`."""
