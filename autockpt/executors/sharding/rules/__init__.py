"""Rules that say how plain tensors are divided among ranks."""
