"""Tests of restarts within a process."""
