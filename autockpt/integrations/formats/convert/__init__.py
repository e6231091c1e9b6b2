"""Conversion between checkpoint formats."""
