"""Tests of `autockpt/executors/storage`."""
