"""Modes, sizes, descriptors and locks of new files: modes are set here, never left to the umask.

A umask of 0 would make everything that a run writes writable by every local user.  The mode of a
new file is one of two.  `private` is for files of the run alone: goals, telemetry, logs, locks.
`readable` is for files that others may read: status, report, plan, exports.  Nothing is ever
writable by others.  A umask may take rights away, as everywhere.
"""

import contextlib
import errno
import fcntl
import os
import resource
import socket
import stat

PRIVATE = 0o600
READABLE = 0o644
PRIVATE_DIRECTORY = 0o700
READABLE_DIRECTORY = 0o755

FIRST_CLEAR_DESCRIPTOR = 512
"""The usual limit is 1,024.  Few scripts have so many files open."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private(path: str, flags: int) -> int:
    """Opener for `open`: a new file is its owner's alone.  Raises OSError."""
    return os.open(path, flags, PRIVATE)


def private_for_long(path: str, flags: int) -> int:
    """Opener for `open`, of a private file that stays open in a process of the user."""
    return clear_of_scripts(private(path, flags))


def clear_of_scripts(descriptor: int) -> int:
    """Takes a descriptor; returns one of the same file with a number that scripts do not meet.

    A script that closes a number twice, or all small ones, would close ours.  The next file that
    it opens would get that number, and what we write would go into it.  Under a small limit of
    open files the number stays as it is.
    """
    if descriptor >= FIRST_CLEAR_DESCRIPTOR:
        return descriptor
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_CLEAR_DESCRIPTOR)
    except OSError:
        return descriptor
    os.close(descriptor)
    return moved


def socket_clear_of_scripts(sock: socket.socket) -> socket.socket:
    """Takes a socket; returns it with such a number."""
    return socket.socket(fileno=clear_of_scripts(sock.detach()))


def readable(path: str, flags: int) -> int:
    """Opener for `open`: others may read a new file.  Raises OSError."""
    return os.open(path, flags, READABLE)


def lock(descriptor: int) -> bool:
    """Whether this process may go on: it has the file's lock, or the file system has no locks.

    Waits for nothing; False: another process has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # as on Lustre that is mounted without `flock`
        return True
    return True


def make_directory(path: str | os.PathLike[str], mode: int = READABLE_DIRECTORY) -> None:
    """Makes a directory with `mode`, and missing parents that others may read at most.

    A directory that exists keeps its mode.  Raises OSError; a failed look at what is there is
    raised as itself, where `os.makedirs` says "File exists".
    """
    missing = []
    at = os.path.abspath(path)
    while not os.path.lexists(at) and os.path.dirname(at) != at:
        missing.append(at)
        at = os.path.dirname(at)
    last = missing[0] if missing else ""
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):  # somebody else was faster
            os.mkdir(directory, mode if directory == last else READABLE_DIRECTORY)
    if not stat.S_ISDIR(os.stat(os.path.abspath(path)).st_mode):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))


def size_limit_advice() -> str:
    """What to do about an EFBIG: name the limit on the size of files that this process has."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY:
        return "the file system takes no file of this size; name another place"
    return f"`ulimit -f` allows files of {soft / 1e6:.3g} MB; raise it with `ulimit -f unlimited`"


def raise_size_limit() -> None:
    """Raises this process's limit on the size of files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def forbid_writing_by_others() -> None:
    """Has this process, which must be ours alone, make nothing that others may write.

    For libraries that make files themselves; a process of the user keeps its umask.
    """
    os.umask(os.umask(_OTHERS_WRITE) | _OTHERS_WRITE)


def close_to_others(path: str | os.PathLike[str]) -> None:
    """Takes from others the right to write what a library made at `path`, and below it."""
    with contextlib.suppress(OSError):
        if stat.S_ISLNK(os.lstat(path).st_mode):
            return
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & _OTHERS_WRITE:
            os.chmod(path, mode & ~_OTHERS_WRITE)
        if os.path.isdir(path):
            for name in os.listdir(path):
                close_to_others(os.path.join(path, name))
