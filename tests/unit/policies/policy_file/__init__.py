"""Tests of `autockpt/policies/policy_file`."""
