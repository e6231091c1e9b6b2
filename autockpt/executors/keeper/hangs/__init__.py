"""A rank that makes no progress: when it is stuck, which rank it is, and its wait."""
