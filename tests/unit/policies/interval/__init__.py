"""Tests of `autockpt/policies/interval`."""
