"""The nouns that flow between the rooms.

Frozen, keyword-only dataclasses without behaviour beyond validation, importable by every room and
importing nothing but the standard library.  `record` gives each a versioned JSON round trip.
"""
