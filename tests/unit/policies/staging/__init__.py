"""Tests of `autockpt/policies/staging`."""
