"""Tests of `autockpt/executors/network`."""
