"""A checkpoint directory on a POSIX file system: link(2) is the put that never replaces."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator

from autockpt import new_files
from autockpt.executors.linux.mounts import mount_point_of
from autockpt.executors.storage.places.place import MAX_RECORD_BYTES, always
from autockpt.values.errors import CorruptCheckpointError, GuardError, StorageError

LOCK_PATIENCE_S = 5.0
"""For the lock of a record: a process that was stopped may hold it, and others have to go on."""
_LOCK_POLL_S = 0.02


class FileSystem:
    """Files in directories, made durable by fsync."""

    is_store = False
    heartbeat_s = 2.0
    patience_s = 10.0

    def publish(
        self, path: str, text: bytes, *, replace: bool, is_wanted: Callable[[], bool] = always
    ) -> bool:
        """See `Place`: temporary file, fsync, read back, link or rename, fsync of the folder."""
        temporary = f"{path}.{secrets.token_hex(6)}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                _write_all(fd, text)
                os.fsync(fd)
            finally:
                os.close(fd)
            if self.read(temporary) != text:
                raise StorageError(f"{temporary}: reads back differently; the disk is suspect")
            if not is_wanted():
                raise GuardError(f"{path}: not wanted any more")
            if replace:
                os.rename(temporary, path)
            else:
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        self.settle(os.path.dirname(path))
        return True

    def replace(
        self, path: str, old: bytes, new: bytes, *, is_wanted: Callable[[], bool] = always
    ) -> bool:
        """See `Place`: it looks again directly before the rename, where no lock excludes others."""

        def stands() -> bool:
            try:
                return self.read(path) == old
            except FileNotFoundError:
                return False

        try:
            with _locked(path):
                if not stands():
                    return False
                return self.publish(
                    path, new, replace=True, is_wanted=lambda: is_wanted() and stands()
                )
        except FileNotFoundError:
            return False
        except GuardError:
            if stands():
                raise
            return False

    def require_replacing(self, path: str) -> None:
        """See `Place`: the lock of the record excludes it."""

    def read(self, path: str, *, limit: int = MAX_RECORD_BYTES) -> bytes:
        """See `Place`; of links, pipes and devices nothing is read."""
        # O_NONBLOCK: opening a pipe must not hang.
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            what = "a link" if error.errno == errno.ELOOP else "a socket or a device"
            raise CorruptCheckpointError(f"{path}: {what}, expected a small regular file") from None
        try:
            status = os.fstat(fd)
            size = status.st_size
            if size > limit or not stat.S_ISREG(status.st_mode):
                raise CorruptCheckpointError(f"{path}: {size} bytes, expected a small regular file")
            data = b""
            while len(data) < size:
                part = os.read(fd, size - len(data))
                if not part:
                    break
                data += part
            return data
        finally:
            os.close(fd)

    def write(self, path: str, text: bytes) -> None:
        """See `Place`."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _write_all(fd, text)
        finally:
            os.close(fd)

    def write_new(self, path: str, text: bytes) -> None:
        """See `Place`; a half-written file is removed."""
        made = False
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            made = True
            try:
                _write_all(fd, text)
                os.fsync(fd)
            finally:
                os.close(fd)
            self.settle(os.path.dirname(path))
        except OSError:
            if made:  # never a file that stood there before
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise

    def names(self, folder: str) -> list[str]:
        """See `Place`."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(folder)
        return []

    def sizes(self, folder: str) -> dict[str, int]:
        """See `Place`."""
        return {name: _bytes(os.path.join(folder, name)) for name in self.names(folder)}

    def exists(self, path: str) -> bool:
        """See `Place`; `os.path.exists` takes every error for absence."""
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def move(self, source: str, target: str) -> None:
        """See `Place`; not between the look and the rename of a `replace`."""
        with _locked(source):
            os.rename(source, target)

    def remove(self, path: str) -> None:
        """See `Place`."""
        os.unlink(path)

    def settle(self, folder: str) -> None:
        """See `Place`."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_folder(self, path: str, *, parents: bool = True) -> None:
        """See `Place`."""
        if parents:
            new_files.make_directory(path)
            return
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, new_files.READABLE_DIRECTORY)

    def lacks_folder(self, path: str) -> bool:
        """See `Place`."""
        return not self.exists(path)

    def mount_of(self, path: str) -> str:
        """See `Place`."""
        return mount_point_of(path)

    def discard(self, folder: str, names: Iterable[str], trash: str) -> None:
        """See `Place`: renamed into the folder `trash` before anything is removed."""
        ours = list(names)
        target = os.path.join(trash, f"{os.path.basename(folder)}-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            if len(ours) < len(os.listdir(folder)):
                for name in ours:
                    os.unlink(os.path.join(folder, name))
                return
            os.rename(folder, target)
            if self.exists(os.path.join(target, "COMMIT")):  # linked since somebody looked
                os.rename(target, folder)
                return
            self.settle(os.path.dirname(folder))
            shutil.rmtree(target, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Excludes other processes that replace or move the record, where the file system has locks.

    Raises FileNotFoundError, and OSError where another process keeps the lock.
    """
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        fd = _open_for_lock(path)
        if fd is None:
            yield
            return
        try:
            if new_files.lock(fd):
                if _is_at(fd, path):
                    yield
                    return
            elif time.monotonic() >= deadline:
                raise OSError(errno.EAGAIN, "another process is replacing it", path)
            else:
                time.sleep(_LOCK_POLL_S)
        finally:
            with contextlib.suppress(OSError):  # nothing was written through it
                os.close(fd)


def _open_for_lock(path: str) -> int | None:
    """None: it cannot be opened.  Over NFS a lock needs a file that is open for writing."""
    for mode in (os.O_RDWR, os.O_RDONLY):
        try:
            return os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError:
            continue
    return None


def _is_at(fd: int, path: str) -> bool:
    """Whether the open file is still the record; another may have been renamed over it."""
    return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _bytes(path: str) -> int:
    """Bytes of a file; 0 for a folder and for a file that is gone."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0
    return 0 if stat.S_ISDIR(status.st_mode) else status.st_size
