"""Parallel wrappers and optimizers of other libraries, seen as local shards."""
