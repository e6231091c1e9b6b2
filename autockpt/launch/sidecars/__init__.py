"""Processes beside a training, at low priority, which never block or fail it."""
