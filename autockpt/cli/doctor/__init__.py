"""Checks of `autockpt doctor`: one file per part of the machine, each returning findings."""
