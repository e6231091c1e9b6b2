"""Tests of `autockpt/executors/keeper/client`."""
