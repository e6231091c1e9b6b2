"""Tests of parked processes."""
