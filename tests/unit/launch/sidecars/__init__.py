"""Tests of `autockpt/launch/sidecars`."""
