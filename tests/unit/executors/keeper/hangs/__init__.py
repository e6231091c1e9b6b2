"""Tests of the look at ranks that make no progress."""
