"""The interface of the storage under a checkpoint directory.

Two kinds of storage offer them: a file system, and an object store.  The lease, the decisions, the
commit and the deletion are the same code on both.  Each operation names a whole path or URL, and
raises OSError like a system call, also where the storage is an object store.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

MAX_RECORD_BYTES = 16 * 2**20
"""Longest record that is read whole."""


def always() -> bool:
    """For a record that is wanted in any case."""
    return True


class Place(Protocol):
    """Storage under a checkpoint directory.  May be used from several threads."""

    is_store: bool
    """True: an object store.  Objects appear whole, and there are no folders and no links."""
    heartbeat_s: float
    """Seconds between two heartbeats of the process that holds the lease."""
    patience_s: float
    """A holder that cannot be seen is dead when its heartbeat stood still for so many seconds."""

    def publish(
        self, path: str, text: bytes, *, replace: bool, is_wanted: Callable[[], bool] = always
    ) -> bool:
        """Makes a record appear whole and durable; False where it exists and may not be replaced.

        Of several callers that do not replace, one gets True.  `is_wanted` is asked just before.
        Raises GuardError where it says no, StorageError for a disk that lies, OSError.
        """

    def replace(
        self, path: str, old: bytes, new: bytes, *, is_wanted: Callable[[], bool] = always
    ) -> bool:
        """Puts the record `new` in the place of `old`; False where the record is another one.

        No other `replace` and no `move` comes between the look and the change.  On a file system
        without locks the record is looked at again directly before.  Raises like `publish`, and
        OSError where another process keeps the lock.
        """

    def require_replacing(self, path: str) -> None:
        """Raises StorageError where `replace` cannot exclude a change between look and put.

        `path`: of a temporary record.
        """

    def read(self, path: str, *, limit: int = MAX_RECORD_BYTES) -> bytes:
        """A record.  Raises FileNotFoundError, CorruptCheckpointError where it is none, OSError."""

    def write(self, path: str, text: bytes) -> None:
        """Writes a mark or a heartbeat, also over another one; not durable on a file system."""

    def write_new(self, path: str, text: bytes) -> None:
        """Writes a durable file that must not exist.  Raises FileExistsError, OSError."""

    def names(self, folder: str) -> list[str]:
        """Names in a folder, of files and folders; none where there is no such folder.

        Everything that was published before the call is among them.
        """

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of what stands in a folder, by name; of a folder in it 0."""

    def exists(self, path: str) -> bool:
        """Whether a file is there.  An error is raised, and never taken for absence."""

    def move(self, source: str, target: str) -> None:
        """Gives a record another name.  Raises FileNotFoundError, OSError like `replace`.

        After a crash both names may exist in an object store.
        """

    def remove(self, path: str) -> None:
        """Removes a file.  Raises FileNotFoundError on a file system, OSError."""

    def settle(self, folder: str) -> None:
        """Makes what was written and removed in a folder durable."""

    def make_folder(self, path: str, *, parents: bool = True) -> None:
        """Makes a folder, and those above it, where the storage has folders.

        Without `parents` a folder above it that is missing is an OSError.
        """

    def lacks_folder(self, path: str) -> bool:
        """Whether a folder that was made is gone; never in an object store."""

    def mount_of(self, path: str) -> str:
        """The mount point above `path`; "" where that is not known."""

    def discard(self, folder: str, names: Iterable[str], trash: str) -> None:
        """Removes `names` of a generation without a COMMIT, and its folder if nothing else is in
        it; what cannot be removed stays."""
