"""Tests of `autockpt/launch`."""
