"""Checkpoints as trees of tensors: read, written and compared."""
