"""Adapters at the edge: checkpoints in the formats of others, and ours through their interfaces.

Every format is read into one shape, a tree: nested dicts and lists whose tensors are `LazyTensor`s,
read one by one when somebody needs them.  Everything else (converting, comparing, loading) works on
trees, so that a format is one file and memory stays at one tensor where the target allows it.
"""
