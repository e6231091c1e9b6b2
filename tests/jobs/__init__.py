"""Whole jobs: real processes that train, are disturbed, and resume."""
