"""Tests of `autockpt/executors/snapshot`."""
