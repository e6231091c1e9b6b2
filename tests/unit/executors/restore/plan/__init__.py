"""Tests of `autockpt/executors/restore/plan`."""
