"""Tests of `autockpt/executors/state/data`."""
