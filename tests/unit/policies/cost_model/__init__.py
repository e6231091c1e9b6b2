"""Tests of `autockpt/policies/cost_model`."""
