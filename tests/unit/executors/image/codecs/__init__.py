"""Tests of `autockpt/executors/image/codecs`."""
