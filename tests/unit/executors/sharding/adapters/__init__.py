"""Tests of `autockpt/executors/sharding/adapters`."""
