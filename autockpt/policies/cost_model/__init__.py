"""Costs of a checkpoint in time and memory, from a profile."""
