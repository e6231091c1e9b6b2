"""Tests of `autockpt/executors/keeper`."""
