"""Reads shards and applies them to the live state."""
