"""Codecs that lose something."""
