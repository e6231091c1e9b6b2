"""Tests of `autockpt/launch/elastic`."""
