"""Tests of `autockpt/reports/analysis`."""
