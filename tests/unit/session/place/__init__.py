"""Tests of `autockpt/session/place`."""
