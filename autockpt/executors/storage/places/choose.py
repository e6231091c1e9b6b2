"""Which storage a path names: a URL an object store, everything else the file system."""

import os

from autockpt.executors.storage.places.file_system import FileSystem
from autockpt.executors.storage.places.place import Place
from autockpt.executors.storage.places.store import StorePlace
from autockpt.values.policy_keys.paths import is_store_url

_FILES, _STORE = FileSystem(), StorePlace()


def place_of(path: str) -> Place:
    """The storage under a path or a URL."""
    return _STORE if is_store_url(path) else _FILES


def absolute(path: str) -> str:
    """A path that does not depend on the working directory; a URL is one."""
    return path.rstrip("/") if is_store_url(path) else os.path.abspath(path)
