"""Finds the boundaries of iterations: optimizers, forwards, accumulation, `ckpt.step()`."""
