"""Mover: an image goes to storage and back whole, or leaves an error and nothing else."""

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from autockpt.executors.linux.memory import Arena
from autockpt.executors.storage import shard_file
from autockpt.executors.storage.shard_file import (
    ImageFile,
    ImageReader,
    read_image,
    run_parallel,
    write_image,
)
from autockpt.values.errors import CorruptCheckpointError, StorageError
from tests.contracts.faults import open_descriptors

CHUNK = 2**16
PAGE = 4096
EDGES = (
    1,
    PAGE - 1,
    PAGE,
    CHUNK - PAGE,
    CHUNK,
    CHUNK + 1,
    CHUNK + PAGE,
    3 * CHUNK,
    5 * CHUNK + PAGE,
)


class StoreContract:
    """Subclass, set `direct`, and give a `folder` fixture on the medium."""

    direct: ClassVar[bool]

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """An empty folder on the medium."""
        return tmp_path

    @pytest.fixture(autouse=True)
    def no_leak(self) -> Iterator[None]:
        """Whatever happens, no descriptor stays open."""
        before = open_descriptors()
        yield
        assert open_descriptors() <= before

    def image(self, nbytes: int) -> memoryview:
        """Random bytes in page-aligned memory."""
        arena = Arena.anonymous(nbytes)
        arena.view[:nbytes] = random.Random(nbytes).randbytes(nbytes)
        return arena.view[:nbytes]

    def write(self, path: Path, nbytes: int = 3 * CHUNK, writers: int = 2) -> memoryview:
        image = self.image(nbytes)
        write_image(str(path), image, writers=writers, chunk_bytes=CHUNK, direct=self.direct)
        return image

    # ----------------------------------------------------------------- what was written is there

    @pytest.mark.parametrize("nbytes", EDGES)
    @pytest.mark.parametrize("writers", [1, 2, 5])
    def test_an_image_comes_back_bit_for_bit(self, folder: Path, nbytes: int, writers: int) -> None:
        """Sizes at the edges of pages and chunks; the file is exactly as long as the image."""
        path = folder / "shard"
        image = self.write(path, nbytes, writers)
        assert path.read_bytes() == image
        back = Arena.anonymous(nbytes).view[:nbytes]
        read_image(str(path), back, readers=writers, chunk_bytes=CHUNK, direct=self.direct)
        assert back == image

    def test_a_file_is_made_durable_once(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After its last byte and its last length."""
        order: list[str] = []
        for name in ("pwrite", "ftruncate", "fsync"):
            monkeypatch.setattr(os, name, Counted(getattr(os, name), log=order))
        self.write(folder / "a")
        assert order[-2:] == ["ftruncate", "fsync"]
        assert order.count("fsync") == 1

    def test_the_timing_adds_up(self, folder: Path) -> None:
        """Phases are measured, none is negative."""
        timing = write_image(
            str(folder / "a"), self.image(CHUNK), writers=1, chunk_bytes=CHUNK, direct=self.direct
        )
        assert timing.bytes == CHUNK
        assert min(timing.open_s, timing.write_s, timing.fsync_s) >= 0
        assert timing.total_s == timing.open_s + timing.write_s + timing.fsync_s

    def test_memory_at_any_address_is_written(self, folder: Path) -> None:
        """O_DIRECT refuses unaligned memory; then the page cache takes it."""
        image = self.image(2 * CHUNK + PAGE)[24:]
        write_image(str(folder / "a"), image, writers=2, chunk_bytes=CHUNK, direct=self.direct)
        assert (folder / "a").read_bytes() == image

    def test_positions_may_be_written_in_any_order_by_any_thread(self, folder: Path) -> None:
        """The pipeline writes the chunk with the header last."""
        image = self.image(8 * CHUNK)
        file = ImageFile(str(folder / "a"), allocate_bytes=len(image), direct=self.direct)

        def write(start: int) -> None:
            file.write_at(start, image[start : start + CHUNK])

        run_parallel(range(7 * CHUNK, -1, -CHUNK), write, workers=4)
        file.finish(len(image))
        assert (folder / "a").read_bytes() == image

    # ----------------------------------------------------------------- nothing is overwritten

    def test_an_existing_file_is_refused_and_untouched(self, folder: Path) -> None:
        """A shard name is used once."""
        (folder / "a").write_bytes(b"precious")
        with pytest.raises(StorageError, match="cannot create: File exists"):
            self.write(folder / "a")
        assert (folder / "a").read_bytes() == b"precious"

    def test_an_existing_file_is_refused_without_direct_io_too(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file system that refuses O_DIRECT before it looks at the name changes nothing."""
        (folder / "a").write_bytes(b"precious")
        refuse_direct_open(monkeypatch)
        with pytest.raises(StorageError, match="cannot create: File exists"):
            self.write(folder / "a")
        assert (folder / "a").read_bytes() == b"precious"

    def test_a_file_system_without_direct_io_is_written_buffered(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """O_DIRECT is a wish."""
        refuse_direct_open(monkeypatch)
        assert self.write(folder / "a") == (folder / "a").read_bytes()

    @pytest.mark.parametrize("dangling", [False, True])
    def test_a_link_is_refused_and_not_followed(self, folder: Path, dangling: bool) -> None:
        """Nobody makes us write somewhere else."""
        target = folder / "target"
        if not dangling:
            target.write_bytes(b"precious")
        (folder / "a").symlink_to(target)
        with pytest.raises(StorageError, match="cannot create"):
            self.write(folder / "a")
        assert dangling != target.exists()
        assert dangling or target.read_bytes() == b"precious"

    def test_a_missing_folder_is_a_storage_error(self, folder: Path) -> None:
        """With the path in the message."""
        with pytest.raises(StorageError, match="gone/a: cannot create: No such file"):
            self.write(folder / "gone" / "a")

    # ----------------------------------------------------------------- storage that fails

    def test_short_writes_are_continued(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A count below the request is no error and no gap."""
        real = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:5000], at))
        assert self.write(folder / "a") == (folder / "a").read_bytes()

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
    @pytest.mark.parametrize("at", [1, 2, 3])
    def test_a_failed_write_leaves_no_file(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, at: int
    ) -> None:
        """Whichever chunk it is; nothing is made durable."""
        counted = Counted(os.pwrite, fail_at=at, error=OSError(code, os.strerror(code)))
        synced = Counted(os.fsync)
        monkeypatch.setattr(os, "pwrite", counted)
        monkeypatch.setattr(os, "fsync", synced)
        with pytest.raises(StorageError, match=f"cannot write: {os.strerror(code)} "):
            self.write(folder / "a")
        assert not (folder / "a").exists()
        assert synced.calls == 0

    def test_a_write_of_nothing_is_an_error_and_no_endless_loop(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A count of zero will not become more."""
        monkeypatch.setattr(os, "pwrite", lambda *_: 0)
        with pytest.raises(StorageError, match="wrote nothing"):
            self.write(folder / "a")
        assert not (folder / "a").exists()

    @pytest.mark.parametrize("name", ["fsync", "ftruncate"])
    def test_a_failed_fsync_is_never_repeated(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """The kernel marks lost pages clean: a second fsync would lie.  The file is dropped."""
        synced = Counted(os.fsync)
        monkeypatch.setattr(os, "fsync", synced)
        error = OSError(errno.EIO, os.strerror(errno.EIO))
        monkeypatch.setattr(os, name, failing := Counted(getattr(os, name), fail_at=1, error=error))
        with pytest.raises(StorageError, match="cannot make durable: Input/output error"):
            self.write(folder / "a")
        assert failing.calls == 1
        assert synced.calls <= 1
        assert not (folder / "a").exists()

    def test_an_error_at_close_leaves_no_file(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Network file systems report late."""
        real, armed = os.close, [True]

        def close(fd: int) -> None:
            ours = os.readlink(f"/proc/self/fd/{fd}") == str(folder / "a")
            real(fd)
            if ours and armed.pop() is True:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "close", close)
        with pytest.raises(StorageError, match="cannot close"):
            self.write(folder / "a")
        assert not (folder / "a").exists()

    def test_a_full_disk_is_noticed_before_the_first_byte(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Space is reserved first; the empty file goes again."""
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(shard_file, "fallocate", Counted(None, fail_at=1, error=error))
        monkeypatch.setattr(os, "pwrite", written := Counted(os.pwrite))
        with pytest.raises(StorageError, match=r"cannot create: No space left .*free space"):
            self.write(folder / "a")
        assert written.calls == 0
        assert not (folder / "a").exists()

    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
    def test_a_file_system_that_cannot_reserve_is_written_all_the_same(
        self, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Reserving is a courtesy."""
        error = OSError(code, os.strerror(code))
        monkeypatch.setattr(shard_file, "fallocate", Counted(None, fail_at=1, error=error))
        assert self.write(folder / "a") == (folder / "a").read_bytes()

    def test_writers_that_meet_a_refusal_of_direct_io_together_all_go_on(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """EINVAL for O_DIRECT at the same moment: whoever clears the flag does so for both."""
        monkeypatch.setattr(os, "pwrite", both_refused(os.pwrite))
        assert self.write(folder / "a", 4 * CHUNK, 2) == (folder / "a").read_bytes()

    # ----------------------------------------------------------------- reading

    def reader(self, path: Path) -> ImageReader:
        return ImageReader(str(path), direct=self.direct)

    def test_a_file_that_ends_early_is_corrupt(self, folder: Path) -> None:
        """Truncation is damage, not a storage error: another source is tried."""
        self.write(folder / "a")
        os.truncate(folder / "a", 2 * CHUNK + 100)
        back = Arena.anonymous(3 * CHUNK).view
        with pytest.raises(CorruptCheckpointError, match=f"ends at {2 * CHUNK + 100} bytes"):
            read_image(str(folder / "a"), back, readers=2, chunk_bytes=CHUNK, direct=self.direct)

    def test_short_reads_are_continued(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Network file systems give what they have."""
        image = self.write(folder / "a")
        real = os.preadv

        def short(fd: int, into: list[memoryview], at: int) -> int:
            return real(fd, [into[0][:4000]], at)

        monkeypatch.setattr(os, "preadv", short)
        back = Arena.anonymous(3 * CHUNK).view
        read_image(str(folder / "a"), back, readers=1, chunk_bytes=CHUNK, direct=self.direct)
        assert back == image

    def test_a_read_error_is_a_storage_error(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The bytes may be fine: nothing is called corrupt."""
        self.write(folder / "a")
        error = OSError(errno.EIO, os.strerror(errno.EIO))
        monkeypatch.setattr(os, "preadv", Counted(os.preadv, fail_at=2, error=error))
        back = Arena.anonymous(3 * CHUNK).view
        with pytest.raises(StorageError, match="a: cannot read: Input/output error"):
            read_image(str(folder / "a"), back, readers=2, chunk_bytes=CHUNK, direct=self.direct)

    def test_readers_that_meet_a_refusal_of_direct_io_together_all_go_on(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As for writers."""
        image = self.write(folder / "a", 4 * CHUNK)
        monkeypatch.setattr(os, "preadv", both_refused(os.preadv))
        back = Arena.anonymous(4 * CHUNK).view
        read_image(str(folder / "a"), back, readers=2, chunk_bytes=CHUNK, direct=self.direct)
        assert back == image

    def test_what_is_no_regular_file_is_refused_at_once(self, folder: Path) -> None:
        """A link is not followed, a pipe does not hang, a folder is no shard."""
        self.write(folder / "a")
        (folder / "link").symlink_to(folder / "a")
        os.mkfifo(folder / "pipe")
        with pytest.raises(StorageError, match="link: cannot open"):
            self.reader(folder / "link")
        with pytest.raises((StorageError, CorruptCheckpointError), match="pipe: "):
            self.reader(folder / "pipe")
        with pytest.raises((StorageError, CorruptCheckpointError), match=f"{folder.name}: "):
            self.reader(folder)
        with pytest.raises(StorageError, match="nothing: cannot open: No such file"):
            self.reader(folder / "nothing")


class Counted:
    """A call that is counted and, at number `fail_at`, fails."""

    def __init__(
        self,
        real: Any,
        *,
        fail_at: int = 0,
        error: OSError | None = None,
        log: list[str] | None = None,
    ) -> None:
        self.real = real
        self.log = log
        self.fail_at = fail_at
        self.error = error
        self.calls = 0
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            self.calls += 1
            if self.log is not None:
                self.log.append(self.real.__name__)
            if self.calls == self.fail_at and self.error is not None:
                raise self.error
        return self.real(*args)


def refuse_direct_open(patch: pytest.MonkeyPatch) -> None:
    """An open that knows no O_DIRECT and says so before it looks at the name."""
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    patch.setattr(os, "open", refusing)


def both_refused(real: Any) -> Any:
    """The first two calls fail with EINVAL, both before either knows; buffered calls pass."""
    import fcntl

    meeting = threading.Barrier(2)
    refused: set[int] = set()

    def call(fd: int, *args: Any) -> Any:
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        if direct and threading.get_ident() not in refused and len(refused) < 2:
            refused.add(threading.get_ident())
            meeting.wait(20)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, *args)

    return call
