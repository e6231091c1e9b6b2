"""Formats of others as trees: read, written, compared, kept."""
