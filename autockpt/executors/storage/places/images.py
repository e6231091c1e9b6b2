"""Shard files wherever they stand: written and read by several threads, on disk or in a store.

An object is put from its first byte to its last, so writers of a stored image wait for their turn.
Parts are sent while the next bytes are digested and encoded.
"""

import contextlib
import threading
import time
from typing import Protocol

from autockpt.executors.storage.places.object_store import PART_BYTES, STREAMS, Upload
from autockpt.executors.storage.places.store import locate
from autockpt.executors.storage.shard_file import ImageFile, ImageReader, run_parallel
from autockpt.values.errors import CorruptCheckpointError, StorageError
from autockpt.values.policy_keys.paths import is_store_url

ABANDONED_S = 0.5
"""A writer that waits for its turn looks so often whether that will still come."""


class ImageWriter(Protocol):
    """A shard file that is being written.  Every method raises StorageError."""

    header_first: bool
    """The page with the header is written in its place, and not after all others."""
    objection: str
    """Why the page cache is used although direct I/O was asked for; "": it is not."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Writes all of `data` at `offset`, from any thread."""

    def abandon(self) -> None:
        """Ends the wait of writers for their turn: some chunk will not come.  Never blocks."""

    def finish(self, length: int) -> float:
        """Makes the file durable, cut to `length` bytes; seconds."""

    def discard(self) -> None:
        """Removes what was written; never raises."""


class ImageSource(Protocol):
    """A shard file that is being read."""

    length: int
    """Bytes."""

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fills `into`, from any thread.  Raises CorruptCheckpointError, StorageError."""

    def close(self) -> None:
        """Lets go; twice is fine."""


def create_image(
    path: str, *, image_bytes: int, encoded: bool, header_bytes: int, direct: bool,
    reuse: str | None = None,
) -> ImageWriter:  # fmt: skip
    """A new shard file for an image, as it is or `encoded` behind `header_bytes`.

    `reuse`: a retired file, whose blocks may be written over.  Raises StorageError.
    """
    if is_store_url(path):
        return StoredImageWriter(path, image_bytes + header_bytes if encoded else image_bytes,
                                 skipped_bytes=header_bytes if encoded else 0)  # fmt: skip
    allocate_bytes = 0 if encoded else image_bytes
    return ImageFile(path, allocate_bytes=allocate_bytes, direct=direct, reuse=reuse)


def open_image(path: str, *, direct: bool) -> ImageSource:
    """A shard file.  Raises CorruptCheckpointError, StorageError."""
    return StoredImageReader(path) if is_store_url(path) else ImageReader(path, direct=direct)


class StoredImageWriter:
    """A shard that is put into an object store.  Nothing is there before `finish`."""

    header_first, objection = True, ""

    def __init__(self, url: str, most_bytes: int, *, skipped_bytes: int = 0) -> None:
        """`skipped_bytes` at the start stay zeros: nothing that is known last can come first."""
        self.path = url
        objects, name = locate(url)
        # A shard may be larger than its image by the padding of every chunk.
        self._upload: Upload | None = objects.begin(name, 2 * most_bytes)
        self._turn = threading.Condition()
        self._at = 0
        """Bytes that were put."""
        self._abandoned = False
        for start in range(0, skipped_bytes, PART_BYTES):
            self.write_at(start, memoryview(bytes(min(PART_BYTES, skipped_bytes - start))))

    def write_at(self, offset: int, data: memoryview) -> None:
        """See `ImageWriter`; waits until everything in front of `offset` was put."""
        with self._turn:
            while not (self._at == offset or self._abandoned):
                self._turn.wait(ABANDONED_S)
            if self._abandoned or self._upload is None:
                raise StorageError(f"{self.path}: given up")
            try:
                self._upload.write(data)
                self._at += len(data)
            except StorageError:
                self._abandoned = True
                raise
            finally:
                self._turn.notify_all()

    def abandon(self) -> None:
        """See `ImageWriter`."""
        self._abandoned = True

    def finish(self, length: int) -> float:
        """See `ImageWriter`."""
        began = time.monotonic()
        upload, self._upload = self._upload, None
        if upload is None or self._abandoned or length != self._at:
            raise StorageError(f"{self.path}: {self._at} bytes were put, expected {length}")
        upload.finish()
        return time.monotonic() - began

    def discard(self) -> None:
        """See `ImageWriter`; parts without an object stay until the bucket's rule removes them."""
        self.abandon()
        self._upload = None


def write_stored(url: str, image: memoryview) -> float:
    """Puts an image as a save does; seconds until it is durable.  Raises StorageError."""
    began = time.monotonic()
    writer = StoredImageWriter(url, len(image))
    try:
        for start in range(0, len(image), PART_BYTES):
            writer.write_at(start, image[start : start + PART_BYTES])
        writer.finish(len(image))
    except BaseException:
        writer.discard()
        raise
    return time.monotonic() - began


def read_stored(url: str, into: memoryview) -> float:
    """Fills `into` as a restore does, `STREAMS` ranges at once; seconds.

    Raises CorruptCheckpointError, StorageError.
    """
    began = time.monotonic()
    reader = StoredImageReader(url)
    run_parallel(
        range(0, len(into), PART_BYTES),
        lambda start: reader.read_at(start, into[start : start + PART_BYTES]),
        workers=STREAMS,
    )
    return time.monotonic() - began


class StoredImageReader:
    """A shard in an object store, read in ranges."""

    def __init__(self, url: str) -> None:
        """Raises CorruptCheckpointError where it is not there, StorageError."""
        self.path = url
        self._objects, self._name = locate(url)
        size = self._objects.size(self._name)
        if size is None:
            raise CorruptCheckpointError(f"{url}: is not there")
        self.length = size

    def read_at(self, offset: int, into: memoryview) -> None:
        """See `ImageSource`."""
        for start in range(0, len(into), PART_BYTES):
            stop = min(start + PART_BYTES, len(into))
            if offset + stop > self.length:
                raise CorruptCheckpointError(
                    f"{self.path}: ends at {self.length} bytes, expected at least {offset + stop}; "
                    "restore an older generation"
                )
            into[start:stop] = self._objects.read_range(self._name, offset + start, offset + stop)

    def close(self) -> None:
        """Nothing is held."""
        with contextlib.suppress(AttributeError):
            del self._objects
