"""The file of a member: frames one after the other, then the compressed index, then where it is.

It appears under its name when it is whole and durable, or not at all.
"""

import contextlib
import os
import secrets
import struct
from collections.abc import Callable

import xxhash

from autockpt import new_files
from autockpt.executors.image.codecs.lossy.entropy import squeezed, unsqueezed
from autockpt.integrations.formats.archive.records import FramePlace, Member
from autockpt.values.errors import ConfigError, CorruptCheckpointError, StorageError
from autockpt.values.record import from_json, to_json

_MAGIC = b"ACARCH1\n"
_FOOT = struct.Struct("<QQ16s8s")
MAX_INDEX_BYTES = 2**28
MAX_FRAME_BYTES = 2**32


class MemberWriter:
    """Appends frames; nothing is left of it unless `finish` ends."""

    def __init__(self, path: str) -> None:
        """Raises StorageError."""
        self.path = path
        self._temporary = f"{path}.{secrets.token_hex(4)}.tmp"
        self._at = 0
        try:
            self._file = open(self._temporary, "xb", opener=new_files.readable)  # noqa: SIM115 - closed by finish or discard
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error

    def append(self, data: bytes) -> FramePlace:
        """Raises StorageError."""
        place = FramePlace(offset=self._at, length=len(data))
        self._write(data)
        return place

    def finish(self, member: Member) -> int:
        """Publishes the file; its bytes.  Raises StorageError, also if the name is taken."""
        text = to_json(member).encode()
        stored = squeezed(text)
        foot = _FOOT.pack(len(stored), len(text), xxhash.xxh3_128_digest(stored), _MAGIC)
        self._write(stored + foot)
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.link(self._temporary, self.path)
            folder = os.open(os.path.dirname(self.path) or ".", os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written: {error.strerror}") from error
        finally:
            self.discard()
        return self._at

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._at += len(data)

    def discard(self) -> None:
        """Removes what was not published."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)


class MemberFile:
    """A member that is there; reads may come from several threads."""

    def __init__(self, path: str) -> None:
        """Raises CorruptCheckpointError, StorageError."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            self.bytes = os.fstat(self._fd).st_size
            self.member, self.digest = self._index()
        except BaseException:
            self.close()
            raise

    def _index(self) -> tuple[Member, str]:
        where = f"{self.path}: index"
        length, raw_bytes, digest, magic = _FOOT.unpack(
            self._read(self.bytes - _FOOT.size, _FOOT.size)
        )
        at = self.bytes - _FOOT.size - length
        if magic != _MAGIC or at < 0 or raw_bytes > MAX_INDEX_BYTES:
            raise CorruptCheckpointError(f"{where}: {magic!r}: not of this format, or cut off")
        stored = self._read(at, length)
        if xxhash.xxh3_128_digest(stored) != digest:
            raise CorruptCheckpointError(f"{where}: does not match its digest")
        try:
            member = from_json(Member, unsqueezed(stored, raw_bytes), where=where)
        except ConfigError as error:
            raise CorruptCheckpointError(str(error)) from None
        return member, digest.hex()

    def frame(self, place: FramePlace) -> bytes:
        """The bytes of a frame.  Raises CorruptCheckpointError, StorageError."""
        if not 0 <= place.length <= MAX_FRAME_BYTES:
            raise CorruptCheckpointError(f"{self.path}: a frame of {place.length} bytes")
        return self._read(place.offset, place.length)

    def _read(self, offset: int, count: int) -> bytes:
        if offset < 0 or offset + count > self.bytes:
            raise CorruptCheckpointError(
                f"{self.path}: has {self.bytes} bytes, {count} at {offset} were expected; cut off"
            )
        return read_exactly(lambda at, left: os.pread(self._fd, left, at), offset, count, self.path)

    def close(self) -> None:
        """Lets the file go."""
        os.close(self._fd)


def read_exactly(read: Callable[[int, int], bytes], offset: int, count: int, where: str) -> bytes:
    """`count` bytes at `offset`, however short single reads are.

    Raises CorruptCheckpointError, StorageError.
    """
    parts = []
    while count:
        try:
            part = read(offset, count)
        except OSError as error:
            raise StorageError(f"{where}: cannot be read: {error.strerror}") from error
        if not part:
            raise CorruptCheckpointError(f"{where}: ends {count} bytes early")
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return b"".join(parts)
