"""A checkpoint directory in an object store: a put on a condition never replaces.

There are no folders, no links and no renames.  A URL such as `s3://bucket/run/RUN` is taken apart
here: the bucket is opened once per process, and the rest is the name of the object.
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TypeVar

from autockpt.executors.storage.places.object_store import Objects
from autockpt.executors.storage.places.place import MAX_RECORD_BYTES, always
from autockpt.values.errors import GuardError, StorageError
from autockpt.values.policy_keys.paths import is_store_url

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0, 30.0, 30.0)
"""Between attempts to read what a start needs; each attempt also repeats its requests."""
PATIENCE_S = 180.0
"""No attempt begins later.  One alone takes minutes where the network takes requests and answers
none.  The protocol gives up a rank that says nothing for half an hour."""
_T = TypeVar("_T")


def read_patiently(path: str, read: Callable[[], _T]) -> _T:
    """The result of `read`, which a store is asked for again while it does not answer.

    Absence and damage are answers.  Raises like `read`.
    """
    deadline = time.monotonic() + PATIENCE_S
    for pause_s in PAUSES_S if is_store_url(path) else ():
        try:
            return read()
        except FileNotFoundError:
            raise
        except (StorageError, OSError):
            if time.monotonic() + pause_s >= deadline:
                raise
            time.sleep(pause_s)
    return read()


class StorePlace:
    """Objects under one bucket.  Every object is durable when it is there."""

    is_store = True
    heartbeat_s = 10.0
    """Each heartbeat is a listing and a put, which a store bills."""
    patience_s = 45.0

    def publish(
        self, path: str, text: bytes, *, replace: bool, is_wanted: Callable[[], bool] = always
    ) -> bool:
        """See `Place`: a put, on the condition that nothing is there unless it may replace."""
        objects, name = locate(path)
        if not is_wanted():
            raise GuardError(f"{path}: not wanted any more")
        with _system_errors():
            if replace:
                objects.write(name, text)
                return True
            # A request that is repeated may meet what its first attempt has put.
            return objects.create(name, text) or objects.read(name) == text

    def replace(
        self, path: str, old: bytes, new: bytes, *, is_wanted: Callable[[], bool] = always
    ) -> bool:
        """See `Place`: a put, on the condition that the object is the one that was read."""
        objects, name = locate(path)
        if not is_wanted():
            raise GuardError(f"{path}: not wanted any more")
        with _system_errors():
            return objects.replace(name, old, new)

    def require_replacing(self, path: str) -> None:
        """See `Place`."""
        objects, name = locate(path)
        objects.require_replacing(name)

    def read(self, path: str, *, limit: int = MAX_RECORD_BYTES) -> bytes:
        """See `Place`."""
        objects, name = locate(path)
        with _system_errors():
            text = objects.read(name, limit)
        if text is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return text

    def write(self, path: str, text: bytes) -> None:
        """See `Place`."""
        self.publish(path, text, replace=True)

    def write_new(self, path: str, text: bytes) -> None:
        """See `Place`."""
        if not self.publish(path, text, replace=False):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def names(self, folder: str) -> list[str]:
        """See `Place`."""
        return list(self.sizes(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """See `Place`."""
        objects, name = locate(folder)
        with _system_errors():
            return objects.listing(name)

    def exists(self, path: str) -> bool:
        """See `Place`; in a bucket that is not there, nothing is: a listing says which it is."""
        objects, name = locate(path)
        with _system_errors():
            return objects.size(name) is not None

    def move(self, source: str, target: str) -> None:
        """See `Place`: a copy, then a deletion."""
        self.publish(target, self.read(source), replace=True)
        self.remove(source)

    def remove(self, path: str) -> None:
        """See `Place`; an object that is gone already is no error."""
        objects, name = locate(path)
        with _system_errors():
            objects.delete(name)

    def settle(self, folder: str) -> None:
        """Everything that is there is durable."""

    def make_folder(self, path: str, *, parents: bool = True) -> None:
        """There are no folders."""

    def lacks_folder(self, path: str) -> bool:
        """There are no folders that could be gone."""
        return False

    def mount_of(self, path: str) -> str:
        """Nothing is mounted."""
        return ""

    def discard(self, folder: str, names: Iterable[str], trash: str) -> None:
        """See `Place`; one by one."""
        with contextlib.suppress(OSError):
            for name in names:
                self.remove(f"{folder}/{name}")


def locate(url: str) -> tuple[Objects, str]:
    """(the bucket, the name of the object in it) of a URL.

    Raises ConfigError for a URL that names no store, or where the library is not installed.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, name = rest.lstrip("/").partition("/")
    root = f"file:///{bucket}" if scheme == "file" else f"{scheme}://{bucket}"
    return _bucket(root, os.getpid()), name.strip("/")


@lru_cache(maxsize=8)
def _bucket(root: str, pid: int) -> Objects:
    """One per process: connections do not outlive a fork."""
    return Objects(root)


@contextlib.contextmanager
def _system_errors() -> Iterator[None]:
    """An error of the store as an OSError: the protocol treats it like one of a disk."""
    try:
        yield
    except StorageError as error:
        denied = type(error.__cause__).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
        number = errno.EACCES if denied else errno.EIO
        cause = str(error).partition(": cannot ")[2].partition(": ")[2]  # the caller says the verb
        raise OSError(number, cause or str(error)) from error
