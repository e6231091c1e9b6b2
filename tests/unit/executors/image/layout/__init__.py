"""Tests of `autockpt/executors/image/layout`."""
