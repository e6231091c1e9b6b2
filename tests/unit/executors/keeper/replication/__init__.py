"""Tests of `autockpt/executors/keeper/replication`."""
