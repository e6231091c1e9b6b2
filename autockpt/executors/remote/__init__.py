"""Copies of good generations in an object store, and back."""

from autockpt.executors.remote.copies import Copied, RemoteCopies
from autockpt.executors.remote.objects import Objects

__all__ = ["Copied", "Objects", "RemoteCopies"]
