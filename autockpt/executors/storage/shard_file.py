"""Host memory <-> storage at the speed of the disk: O_DIRECT, a few writers, one fsync.

Two writers and 8 MiB chunks are within 15 % of the best on every disk measured.  The digest of one
chunk overlaps the write of another.  Every open file is asked what it states about direct I/O:
where it objects, the page cache is used.  An fsync that failed is never repeated: the kernel marks
the lost pages clean, and a second fsync would say "fine" (fsyncgate).  The file is dropped instead
and written again from memory under a new name, which is the caller's decision.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from autockpt import new_files
from autockpt.executors.linux.direct_io import objection
from autockpt.executors.linux.memory import PAGE_BYTES, page_align
from autockpt.values.errors import CorruptCheckpointError, StorageError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_NOT_RESERVED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of file systems and kernels that do not reserve: the file grows as it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTiming:
    """Seconds of one written image, by phase."""

    bytes: int
    open_s: float
    write_s: float
    fsync_s: float

    @property
    def total_s(self) -> float:
        """Open to durable."""
        return self.open_s + self.write_s + self.fsync_s


class ImageFile:
    """One shard file being written; positions may be written from several threads.

    Created exclusively and without following links, preallocated, direct where the file system
    takes it.  `finish` makes it durable; `discard` removes it.  Raises StorageError.
    """

    header_first = False

    def __init__(
        self,
        path: str,
        *,
        allocate_bytes: int,
        direct: bool,
        create: bool = True,
        reuse: str | None = None,
    ):
        """`reuse`: a file that no process needs any more; it becomes this one with its blocks."""
        self.path = path
        self.direct = direct
        self.objection = ""
        """Why the page cache is used although `direct` was asked for, where that is stated."""
        self._allocated = page_align(allocate_bytes)
        try:
            self._fd = -1 if reuse is None else _take_over(reuse, path, direct=direct)
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_CLOEXEC
                if create:
                    flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                self._fd = _open_direct(path, flags, direct=direct)
        except OSError as error:
            raise _storage_error("create", path, error) from error
        try:
            self.direct = direct and bool(_get_flags(self._fd) & os.O_DIRECT)
            if direct and not self.direct:
                self.objection = objection(self._fd)
            if allocate_bytes:
                _allocate(self._fd, self._allocated)
        except OSError as error:
            self.discard()
            raise _storage_error("create", path, error) from error

    def write_at(self, offset: int, data: memoryview) -> None:
        """Writes all of `data` at `offset`; both are multiples of a page in direct mode."""
        try:
            _pwrite_all(self._fd, data, offset)
        except OSError as error:
            raise _storage_error("write", self.path, error) from error

    def abandon(self) -> None:
        """No writer waits for another one."""

    def finish(self, length: int) -> float:
        """Cuts the file to `length`, makes it durable and closes it; seconds of the fsync."""
        began = time.monotonic()
        try:
            os.ftruncate(self._fd, length)
            os.fsync(self._fd)
        except OSError as error:
            self.discard()
            raise _storage_error("make durable", self.path, error) from error
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)
        except OSError as error:
            self.discard()
            raise _storage_error("close", self.path, error) from error
        return time.monotonic() - began

    def discard(self) -> None:
        """Closes and removes the file; never raises."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def write_image(
    path: str, image: memoryview, *, writers: int, chunk_bytes: int, direct: bool
) -> WriteTiming:
    """Writes page-aligned `image` to a new file and makes it durable.

    A `path` under /proc/self/fd names a file that is open already (the probes unlink theirs).
    """
    began = time.monotonic()
    file = ImageFile(
        path,
        allocate_bytes=len(image),
        direct=direct,
        create=not path.startswith("/proc/self/fd/"),
    )
    opened = time.monotonic()

    def write(start: int) -> None:
        stop = min(start + chunk_bytes, page_align(len(image)), len(image))
        file.write_at(start, image[start:stop])

    try:
        run_parallel(range(0, len(image), chunk_bytes), write, workers=writers)
    except BaseException:
        file.discard()
        raise
    written = time.monotonic()
    fsync_s = file.finish(len(image))
    return WriteTiming(
        bytes=len(image), open_s=opened - began, write_s=written - opened, fsync_s=fsync_s
    )


def read_image(
    path: str, into: memoryview, *, readers: int, chunk_bytes: int, direct: bool
) -> float:
    """Reads the first len(into) bytes of a file into page-aligned memory; seconds."""
    began = time.monotonic()
    with ImageReader(path, direct=direct) as reader:

        def read(start: int) -> None:
            reader.read_at(start, into[start : start + chunk_bytes])

        run_parallel(range(0, len(into), chunk_bytes), read, workers=readers)
    return time.monotonic() - began


class ImageReader:
    """A shard file being read, direct where the file system takes it."""

    def __init__(self, path: str, *, direct: bool) -> None:
        self.path = path
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not hang
            if not path.startswith("/proc/self/fd/"):
                flags |= os.O_NOFOLLOW
            self._fd = _open_direct(path, flags, direct=direct)
        except OSError as error:
            raise _storage_error("open", path, error) from error
        status = os.fstat(self._fd)
        self.length = status.st_size
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise CorruptCheckpointError(f"{path}: is not a regular file")
        self._direct = bool(_get_flags(self._fd) & os.O_DIRECT)

    def __enter__(self) -> "ImageReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:  # closed twice is closed
            os.close(fd)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fills `into` from `offset`.  Raises CorruptCheckpointError when the file is shorter."""
        done = 0
        direct = self._direct
        try:
            while done < len(into):
                count = os.preadv(self._fd, [into[done:]], offset + done)
                if count == 0:
                    raise CorruptCheckpointError(
                        f"{self.path}: ends at {offset + done} bytes, expected at least "
                        f"{offset + len(into)}; restore an older generation"
                    )
                done += count
                if self._direct and done < len(into) and done % PAGE_BYTES:
                    self._leave_direct()
        except OSError as error:
            if error.errno == errno.EINVAL and direct:
                # `direct` as it was before: another reader may have left it in the meantime.
                self._leave_direct()
                self.read_at(offset, into)
                return
            raise _storage_error("read", self.path, error) from error

    def _leave_direct(self) -> None:
        """Reads on through the page cache: unaligned tails, and media that refuse O_DIRECT."""
        fcntl.fcntl(self._fd, fcntl.F_SETFL, _get_flags(self._fd) & ~os.O_DIRECT)
        self._direct = False


def run_parallel(starts: range, work: Callable[[int], None], *, workers: int) -> None:
    """`work(start)` for every start, in order of hand-out, by `workers` threads.

    The first exception stops the hand-out and is raised when all threads have ended.
    """
    if workers <= 1 or len(starts) <= 1:
        for start in starts:
            work(start)
        return
    lock = threading.Lock()
    rest = iter(starts)
    failures: list[BaseException] = []

    def drain() -> None:
        while not failures:
            with lock:
                start = next(rest, None)
            if start is None:
                return
            try:
                work(start)
            except BaseException as error:  # re-raised below, in the calling thread
                failures.append(error)
                return

    threads = [threading.Thread(target=drain, daemon=True) for _ in range(workers - 1)]
    for thread in threads:
        thread.start()
    drain()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _take_over(spare: str, path: str, *, direct: bool) -> int:
    """Renames a retired file to `path` and opens it, without its header; -1 if it must not be used.

    Overwriting blocks that a file has is 1.7 times as fast as new ones.  If another process still
    reads or maps a file, or it has a second name, the file is removed instead, which does no harm.
    """
    try:
        # O_NONBLOCK: opening a pipe must not hang.
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = _open_direct(spare, flags, direct=direct)
    except OSError:
        return -1
    name = spare
    try:
        if not _is_ours_alone(fd) or os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        os.rename(spare, path)
        name = path
        # Whoever finds the half-written file must not take it for the old image.
        _pwrite_all(fd, memoryview(mmap.mmap(-1, PAGE_BYTES)), 0)
    except OSError:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(name)
        return -1
    return fd


def _is_ours_alone(fd: int) -> bool:
    """A regular file of ours with one name that no other process has open or mapped.

    A write lease is granted only then; where there are no leases nothing is known.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def _open_direct(path: str, flags: int, *, direct: bool) -> int:
    if direct:
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            if flags & os.O_EXCL:
                return _reopen_empty(path, flags)
        else:
            if objection(fd):
                _clear_direct(fd)
            return fd
    return os.open(path, flags, 0o600)


def _reopen_empty(path: str, flags: int) -> int:
    """The file system does not take O_DIRECT and may have created the file on the way.

    Only an empty file can be that one; raises FileExistsError for any other.
    """
    fd = os.open(path, flags & ~os.O_EXCL, 0o600)
    if os.fstat(fd).st_size:
        os.close(fd)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    return fd


def _get_flags(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL)


def _allocate(fd: int, nbytes: int) -> None:
    """Reserves space so that a full disk is an error now and not in the middle."""
    try:
        fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NOT_RESERVED:
            raise


def fallocate(fd: int, offset: int, nbytes: int) -> None:
    """The system call.  Where the file system has none, `os.posix_fallocate` reads and writes a
    byte of every block instead (glibc).  Raises OSError."""
    while _libc.fallocate(fd, 0, offset, nbytes):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        direct = _get_flags(fd) & os.O_DIRECT  # before: another writer may clear it meanwhile
        try:
            count = os.pwrite(fd, data[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            _clear_direct(fd)
            continue
        if count == 0:
            raise OSError(errno.EIO, "wrote nothing")
        done += count
        if done < len(data) and done % PAGE_BYTES:
            _clear_direct(fd)


def _clear_direct(fd: int) -> None:
    """Goes on through the page cache (unaligned rest of a short write, fussy file systems)."""
    fcntl.fcntl(fd, fcntl.F_SETFL, _get_flags(fd) & ~os.O_DIRECT)


def is_full(error: BaseException) -> bool:
    """Whether there was no room, or no quota, for it."""
    cause = error.__cause__ if isinstance(error, StorageError) else error
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def _storage_error(verb: str, path: str, error: OSError) -> StorageError:
    advice = {
        errno.ENOSPC: "free space or lower keep.last; older checkpoints are untouched",
        errno.EDQUOT: "the quota is used up; older checkpoints are untouched",
        errno.EFBIG: f"{new_files.size_limit_advice()}; older checkpoints are untouched",
        errno.EROFS: "the file system is read-only; name another disk.path",
        errno.EACCES: "no permission; name another disk.path or fix its owner",
    }.get(error.errno or 0, "older checkpoints are untouched")
    return StorageError(f"{path}: cannot {verb}: {error.strerror} ({advice})")
