"""Files that leave nothing behind: unnamed from the start, or unlinked as soon as they are open.

A process that is killed takes its unnamed file with it.  Where a file system cannot do that, the
file has the name `.autockpt-probe-<pid>-<host>-<n>` and is removed at the end.  If it stays, the
next profile in the same directory removes it.
"""

import contextlib
import itertools
import os
import re
import socket
import time
import zlib
from collections.abc import Iterator

PREFIX = ".autockpt-probe-"
STALE_S = 3600.0
"""A probe file of another host is a left-over after this long: no profile takes an hour."""

_NAME = re.compile(re.escape(PREFIX) + r"(\d+)-([0-9a-f]{8})-\d+")
_counter = itertools.count()


def _host() -> str:
    """Eight hex digits: process ids mean nothing on another host of a shared directory."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


@contextlib.contextmanager
def probe_file(directory: str, *, named: bool = False) -> Iterator[str]:
    """A path in `directory` for a mover to write once and read often; gone afterwards.

    It is under /proc/self/fd when the file is open already.  Otherwise (`named`, or the file system
    cannot do better) the file does not exist yet.  Raises OSError when the directory takes no file.
    """
    fd = None if named else _unnamed(directory)
    if fd is not None:
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
        return
    path = os.path.join(directory, f"{PREFIX}{os.getpid()}-{_host()}-{next(_counter)}")
    with _unlinked(path, keep_name=named) as usable:
        yield usable


def _unnamed(directory: str) -> int | None:
    """A descriptor of a file without a name that can be opened again by path, or None."""
    with contextlib.suppress(OSError, AttributeError):
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if _reopens(fd):
            return fd
        os.close(fd)
    return None


def _reopens(fd: int) -> bool:
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _unlinked(path: str, *, keep_name: bool) -> Iterator[str]:
    """The fall-back: create and unlink, if the descriptor opens again; else unlink at the end."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.unlink(path)
        if not keep_name and _reopens(fd):
            yield f"/proc/self/fd/{fd}"
            return
    finally:
        os.close(fd)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def sweep(directory: str) -> int:
    """Removes probe files of processes that are gone; returns how many."""
    removed = 0
    try:
        names = os.listdir(directory)
    except OSError:
        return 0
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                if _is_left_over(path, int(match.group(1)), match.group(2)):
                    os.unlink(path)
                    removed += 1
    return removed


def _is_left_over(path: str, pid: int, host: str) -> bool:
    if host == _host():
        return not os.path.exists(f"/proc/{pid}")
    return time.time() - os.stat(path).st_mtime > STALE_S
