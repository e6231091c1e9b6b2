"""Tests of one room at a time, in the tree of the package."""
