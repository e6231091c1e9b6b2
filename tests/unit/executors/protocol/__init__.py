"""Tests of `autockpt/executors/protocol`."""
