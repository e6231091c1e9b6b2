"""Tests of `autockpt/executors/linux`."""
