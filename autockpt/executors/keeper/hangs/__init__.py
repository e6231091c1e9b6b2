"""A rank that makes no progress: when it is stuck, which one it is, and what it waits in."""
