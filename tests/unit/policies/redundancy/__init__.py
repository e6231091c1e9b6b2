"""Tests of `autockpt/policies/redundancy`."""
