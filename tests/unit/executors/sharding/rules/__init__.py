"""Tests of `autockpt/executors/sharding/rules`."""
