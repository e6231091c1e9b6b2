"""One shard on its way: copied -> digest -> (encode) -> write, chunk by chunk.

Chunks flow as soon as the trainer's counter says that they are in the slot, long before the
snapshot is sealed; nothing is reported before it is.  The digest is taken once, right before the
write, while the chunk is still in cache.  The chunk with the header is written last, so that a file
that was cut short is no valid image.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autockpt.executors.codecs import codec as codec_of
from autockpt.executors.image import ImageIndex, StoredChunk, chunk_digest
from autockpt.executors.memory import PAGE_BYTES, page_align
from autockpt.executors.persist import ImageFile
from autockpt.values.errors import AutockptError, CorruptCheckpointError

POLL_S = 0.0005
"""How often the trainer's progress counter is read while a snapshot is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistTarget:
    """Where and how the shard is written."""

    path: str
    prepare: Callable[[], object]
    """Makes the directory; called on a worker thread before the file is created."""
    writers: int
    direct_io: bool
    codec: str
    codec_ranges: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOutcome:
    """What became of the shard file."""

    stored_bytes: int
    write_s: float
    stored: tuple[StoredChunk, ...]


@dataclass(slots=True)
class _Encoded:
    """Bookkeeping of an encoded file: frames are appended in page-aligned places."""

    next_offset: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    chunks: dict[int, StoredChunk] = field(default_factory=dict)


class ShardPipeline:
    """Digests and, with a target, writes one image; calls back from its own threads.

    `on_digested(digests)` once after `sealed()`; `on_persisted(outcome)` or `on_failed(error)` once
    when there is a target.  After `cancel()` returns no thread touches the slot and nothing more is
    called.
    """

    def __init__(
        self,
        image: memoryview,
        *,
        chunk_bytes: int,
        available: Callable[[], int],
        streaming: bool,
        known: ImageIndex | None,
        target: PersistTarget | None,
        on_digested: Callable[[tuple[str, ...]], None],
        on_persisted: Callable[[ShardOutcome], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._image = image
        self._chunk_bytes = chunk_bytes
        self._available = available
        self._streaming = streaming
        self._known = known
        self._target = target
        self._on_digested = on_digested
        self._on_persisted = on_persisted
        self._on_failed = on_failed
        self._chunks = -(-len(image) // chunk_bytes)
        self._digests: list[str] = [""] * self._chunks
        self._lock = threading.Lock()
        self._order = iter([*range(1, self._chunks), 0])
        self._left = self._chunks
        self._cancelled = False
        self._sealed = threading.Event()
        self._file: ImageFile | None = None
        self._encoded: _Encoded | None = None
        self._began_s = 0.0
        self._failure: Exception | None = None
        self._finished = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the workers; creates the file first (errors arrive by `on_failed`)."""
        count = 1 if self._target is None else self._target.writers
        self._threads = [
            threading.Thread(target=self._work, name=f"autockpt-shard-{i}", daemon=True)
            for i in range(min(count, self._chunks))
        ]
        opener = threading.Thread(target=self._open_and_go, name="autockpt-shard-open", daemon=True)
        self._threads.append(opener)
        opener.start()

    def sealed(self) -> None:
        """The trainer proved that every byte is in the slot."""
        self._sealed.set()

    def cancel(self) -> None:
        """Stops reading the slot and removes a half-written file; returns when that is true."""
        self._cancelled = True
        self._sealed.set()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()
        with self._lock:
            if self._file is not None:
                self._file.discard()
                self._file = None

    def _open_and_go(self) -> None:
        try:
            if self._target is not None:
                self._open(self._target)
        except Exception as error:
            self._fail(error)
        for thread in self._threads[:-1]:
            thread.start()
        for thread in self._threads[:-1]:
            thread.join()
        if not self._cancelled:
            self._finish()

    def _open(self, target: PersistTarget) -> None:
        self._began_s = time.monotonic()
        target.prepare()
        encoded = target.codec != "none"
        self._file = ImageFile(
            target.path,
            allocate_bytes=0 if encoded else len(self._image),
            direct=target.direct_io,
        )
        if encoded:
            header = _align_header(self._chunks)
            self._encoded = _Encoded(next_offset=header)

    def _work(self) -> None:
        while not self._cancelled:
            with self._lock:
                index = next(self._order, None)
            if index is None:
                return
            start = index * self._chunk_bytes
            stop = min(start + self._chunk_bytes, len(self._image))
            if not self._wait_for(stop) or (not index and not self._wait_for_others()):
                return
            try:
                self._handle(index, start, stop)
            except Exception as error:
                self._fail(error)
            with self._lock:
                self._left -= 1

    def _wait_for(self, stop: int) -> bool:
        while not self._cancelled:
            if self._sealed.is_set() or (self._streaming and self._available() >= stop):
                return not self._cancelled
            time.sleep(POLL_S)
        return False

    def _wait_for_others(self) -> bool:
        """The header comes last; another writer may still wait for its chunk."""
        while self._left > 1 and not self._cancelled:
            time.sleep(POLL_S)
        return not self._cancelled

    def _handle(self, index: int, start: int, stop: int) -> None:
        data = self._image[start:stop]
        digest = chunk_digest(data)
        if self._known is not None and digest != self._known.digests[index]:
            raise CorruptCheckpointError(
                f"slot: chunk {index} of generation {self._known.generation} changed since it "
                "was sealed"
            )
        self._digests[index] = digest
        if self._file is not None and self._failure is None:
            if self._encoded is None:
                self._file.write_at(start, data)
            else:
                self._write_encoded(index, start, stop, data, digest)

    def _write_encoded(
        self, index: int, start: int, stop: int, data: memoryview, digest: str
    ) -> None:
        assert self._target is not None
        assert self._encoded is not None
        assert self._file is not None
        frame = b""
        if _inside(start, stop, self._target.codec_ranges):
            frame = codec_of(self._target.codec).encode(data)
        if not frame or len(frame) >= len(data):
            frame, length, stored_digest = b"", len(data), digest
        else:
            length, stored_digest = len(frame), chunk_digest(memoryview(frame))
        with self._encoded.lock:
            offset = self._encoded.next_offset
            self._encoded.next_offset += page_align(length)
            self._encoded.chunks[index] = StoredChunk(
                offset=offset, length=length, digest=stored_digest
            )
        self._file.write_at(offset, _aligned(frame) if frame else data)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error

    def _finish(self) -> None:
        """After all chunks: seal, then make the file durable."""
        self._sealed.wait()
        if self._cancelled:
            return
        if all(self._digests) and self._known is None:
            self._on_digested(tuple(self._digests))
        if self._target is None:
            return
        outcome: ShardOutcome | None = None
        if self._failure is None:
            try:
                outcome = self._make_durable()
            except Exception as error:
                self._failure = error
        if self._is_cancelled():
            return
        if outcome is not None:
            self._on_persisted(outcome)
            return
        if self._file is not None:
            self._file.discard()
            self._file = None
        failure = self._failure or AutockptError("the shard was not written")
        self._on_failed(failure)

    def _is_cancelled(self) -> bool:
        """Set by the keeper's thread while ours worked."""
        return self._cancelled

    def _make_durable(self) -> ShardOutcome:
        assert self._file is not None
        length = len(self._image)
        stored: tuple[StoredChunk, ...] = ()
        if self._encoded is not None:
            stored = tuple(self._encoded.chunks[i] for i in range(self._chunks))
            length = self._encoded.next_offset
            header = encoded_header(stored, length, _align_header(self._chunks))
            self._file.write_at(0, _aligned(header))
        file, self._file = self._file, None
        file.finish(length)
        return ShardOutcome(
            stored_bytes=length, write_s=time.monotonic() - self._began_s, stored=stored
        )


def encoded_header(stored: tuple[StoredChunk, ...], length: int, header_bytes: int) -> bytes:
    """A safetensors header in which every frame is a U8 tensor and gaps are pads."""
    table: dict[str, object] = {"__metadata__": {"format": "autockpt-encoded-1"}}
    end = header_bytes
    for index, chunk in sorted(enumerate(stored), key=lambda pair: pair[1].offset):
        if chunk.offset > end:
            table[f"__pad.{end:x}"] = _row(end, chunk.offset, header_bytes)
        end = chunk.offset + chunk.length
        table[f"__chunk@enc.{index}"] = _row(chunk.offset, end, header_bytes)
    if length > end:
        table[f"__pad.{end:x}"] = _row(end, length, header_bytes)
    text = json.dumps(table, separators=(",", ":")).encode()
    room = header_bytes - 8
    return room.to_bytes(8, "little") + text + b" " * (room - len(text))


def _row(start: int, stop: int, base: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start - base, stop - base]}


def _align_header(chunks: int) -> int:
    return page_align(8 + 200 + 240 * chunks)


def _inside(start: int, stop: int, ranges: tuple[tuple[int, ...], ...]) -> bool:
    return not ranges or any(low <= start and stop <= high for low, high in ranges)


def _aligned(frame: bytes) -> memoryview:
    """The frame padded to pages, in page-aligned memory (O_DIRECT)."""
    import mmap

    buffer = mmap.mmap(-1, max(PAGE_BYTES, page_align(len(frame))))
    buffer[: len(frame)] = frame
    return memoryview(buffer)
