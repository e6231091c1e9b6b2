"""Tests of `autockpt/reports/html`."""
