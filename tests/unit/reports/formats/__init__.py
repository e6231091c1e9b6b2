"""Tests of `autockpt/reports/formats`."""
