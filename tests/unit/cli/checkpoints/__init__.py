"""Tests of `autockpt/cli/checkpoints`."""
