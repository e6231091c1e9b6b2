"""`CheckpointDirectory` keeps the store contract."""

from pathlib import Path

from autockpt.executors.directory import CheckpointDirectory
from tests.contracts.directory_contract import DirectoryContract


def on_path(path: Path) -> CheckpointDirectory:
    """As each process makes its own."""
    return CheckpointDirectory(str(path))


class TestDirectory(DirectoryContract):
    """On a POSIX file system."""

    make = staticmethod(on_path)
