"""Tests of `autockpt/executors/keeper/restoring`."""
