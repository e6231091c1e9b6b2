"""Tests of `autockpt/executors/state`."""
