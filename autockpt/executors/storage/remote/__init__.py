"""Copies of good generations in an object store, and back."""

from autockpt.executors.storage.places.object_store import Objects
from autockpt.executors.storage.remote.replication import Copied, RemoteCopies

__all__ = ["Copied", "Objects", "RemoteCopies"]
