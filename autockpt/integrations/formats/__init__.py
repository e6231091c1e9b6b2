"""Checkpoints in the formats of others.

Every format is read into one shape, a tree: nested dicts and lists whose tensors are `LazyTensor`s,
read one by one when needed.  Everything else (converting, comparing, loading) works on trees.  So a
format is one file, and memory stays at one tensor where the target allows it.
"""
