"""A shard on its way from the slot to storage."""
