"""One shard on its way: copied -> digest -> (encode) -> write, all stages at once.

Chunks flow as soon as the trainer's counter says that they are in the slot, long before the
snapshot is sealed.  Nothing is reported before the seal.  The slot is the buffer between all
stages, so nothing is ever copied again and no stage can run out of room.  Where no image fits in
memory, a `Drain` gives each chunk back when it is written.  The digest is taken once, while the
chunk is still in cache from the copy, and apart from the writes.  So the memory tier is complete
when the digests are, even with slow storage.  The page with the header is written last, so that a
file that was cut short is no valid image.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from autockpt.executors.image.codecs import codec as codec_of
from autockpt.executors.image.container import ImageIndex, StoredChunk, chunk_digest
from autockpt.executors.image.layout.runs import Run, runs_of
from autockpt.executors.keeper.saving.delta_bases import Base
from autockpt.executors.keeper.saving.drain import Drain
from autockpt.executors.keeper.saving.encoded_file import (
    FrameBuffer,
    align_header,
    encode_chunk,
    encoded_header,
)
from autockpt.executors.linux.memory import PAGE_BYTES, page_align
from autockpt.executors.storage.places.images import ImageWriter, create_image
from autockpt.values.errors import AutockptError, CorruptCheckpointError

POLL_S = 0.001
"""How often the trainer's progress counter is read while it moves."""
POLL_STILL_S = 0.016
"""The most between two readings while it does not move.  A copy that waits for windows of the
training may take the whole iteration, and each wake-up takes its core from another thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistTarget:
    """Where and how the shard is written."""

    path: str
    prepare: Callable[[], object]
    """Makes the directory; called on a worker thread before the file is created."""
    spare: Callable[[], str | None] = lambda: None
    """Path of a retired shard file whose blocks may be written over, None when there is none."""
    writers: int
    direct_io: bool
    codec: str
    codec_ranges: tuple[tuple[int, ...], ...]
    base: Base | None = None
    """The base of chunks that are stored as differences."""
    finish: Callable[["ShardOutcome"], object] = lambda outcome: None
    """Writes the index; called on a worker thread once the file is durable and the digests are
    announced.  An exception fails the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOutcome:
    """The result of writing the shard file."""

    stored_bytes: int
    write_s: float
    stored: tuple[StoredChunk, ...]
    objection: str = ""
    """Why it went through the page cache although direct I/O was planned, where that is stated."""

    @property
    def needs_base(self) -> bool:
        """Some chunk is stored as a difference."""
        return any(chunk.base for chunk in self.stored)


@dataclass(slots=True)
class _Encoded:
    """Bookkeeping of an encoded file: frames are appended in page-aligned places."""

    next_offset: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    chunks: dict[int, StoredChunk] = field(default_factory=dict)


class ShardPipeline:
    """Digests and, with a target, writes one image; calls back from its own threads.

    `on_digested(digests)` comes once after `sealed()`, and not before `after`, the `settled` of the
    image before, or `on_undigested(error)`.  Neither comes for an image whose digests are `known`,
    which waits for no other image.  `on_persisted(outcome)` or `on_failed(error)` comes once when
    there is a target.  After `cancel()` returns the slot may be written over, and nothing more is
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
        on_undigested: Callable[[Exception], None] = lambda error: None,
        after: threading.Event | None = None,
        inspect: Callable[[memoryview], None] = lambda image: None,
        drain: Drain | None = None,
    ) -> None:
        """`inspect` looks at the whole image, on a thread of ours, before it is announced.

        `drain`: the image streams; it gives the memory of each chunk back that is written.
        """
        self._image = image
        self._chunk_bytes = chunk_bytes
        self._available = available
        self._streaming = streaming
        self._known = known
        self._target = target
        self._on_digested = on_digested
        self._on_persisted = on_persisted
        self._on_failed = on_failed
        self._on_undigested = on_undigested
        self._chunks = -(-len(image) // chunk_bytes)
        self._digests: list[str] = [""] * self._chunks
        self._ready: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """Chunks for the writers."""
        self._lock = threading.Condition()
        self._cancelled = False
        self._encoding = 0
        """Writers that read the slot to encode it."""
        self._sealed = threading.Event()
        self.settled = threading.Event()
        """The digests were announced, or never will be."""
        self._after = after
        self._inspect = inspect
        self._drain = drain
        self._file: ImageWriter | None = None
        self._encoded: _Encoded | None = None
        self._began_s = 0.0
        self._moved_s = time.monotonic()
        self._failure: Exception | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts all stages; errors arrive by `on_failed`."""
        stages = [("digest", self._digest)]
        if self._target is not None:
            stages.append(("persist", self._persist))
        self._threads = [
            threading.Thread(target=work, name=f"autockpt-{name}", daemon=True)
            for name, work in stages
        ]
        for thread in self._threads:
            thread.start()

    def sealed(self) -> None:
        """The trainer proved that every byte is in the slot."""
        self._sealed.set()

    @property
    def still_s(self) -> float:
        """Seconds since the storage took something; 0 while the snapshot is not sealed."""
        return time.monotonic() - self._moved_s if self.settled.is_set() else 0.0

    def cancel(self) -> None:
        """Stops the digests and the encoding; returns when they have.

        Never waits for the file system: the keeper's loop calls this, and a storage that hangs
        would hang the whole node.  A write under way may read what the slot is filled with next;
        its file is removed by the thread that writes it.
        """
        self._abandon()
        with self._lock:
            self._cancelled = True
            if self._drain is not None:
                self._drain.stop()
            self._sealed.set()
            self._lock.wait_for(lambda: not self._encoding)
        for thread in self._threads[:1]:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()
        self.settled.set()

    def join(self) -> None:
        """Waits until every thread has ended."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    # ------------------------------------------------------------------ digest

    def _digest(self) -> None:
        """First stage: follows the copy, hands every chunk on."""
        try:
            for index in range(self._chunks):
                start = index * self._chunk_bytes
                stop = min(start + self._chunk_bytes, len(self._image))
                if not self._wait_for(stop):
                    return
                self._take_digest(index, start, stop)
                if self._streaming:
                    self._ready.put(index)
            self._hand_over()
        except Exception as error:
            self._fail(error)
            self._sealed.wait()
            if self._known is None and not self._cancelled:
                self._on_undigested(error)
        finally:
            self.settled.set()
            for _ in range(self._writers):
                self._ready.put(None)

    def _wait_for(self, stop: int) -> bool:
        seen, pause_s = -1, POLL_S
        while not self._cancelled:
            copied = self._available() if self._streaming else 0
            if self._sealed.is_set() or copied >= stop:
                return not self._cancelled
            pause_s = POLL_S if copied != seen else min(2 * pause_s, POLL_STILL_S)
            seen = copied
            self._sealed.wait(pause_s if self._streaming else None)
        return False

    def _take_digest(self, index: int, start: int, stop: int) -> None:
        digest = chunk_digest(self._image[start:stop])
        if self._known is not None and digest != self._known.digests[index]:
            raise CorruptCheckpointError(
                f"slot: chunk {index} of checkpoint {self._known.generation} changed since it "
                "was sealed"
            )
        self._digests[index] = digest
        if self._drain is not None:
            self._drain.look(start, self._image[start:stop])

    def _hand_over(self) -> None:
        """All chunks are digested: announced when sealed, in the order of the snapshots."""
        if not self._streaming:
            for index in range(self._chunks):
                self._ready.put(index)
        self._sealed.wait()
        if self._known is not None:
            return
        if self._drain is None:
            self._inspect(self._image)
        while self._after is not None and not self._cancelled and not self._after.wait(0.05):
            pass
        if not self._cancelled:
            self._on_digested(tuple(self._digests))

    # ------------------------------------------------------------------ write

    @property
    def _writers(self) -> int:
        return 0 if self._target is None else min(self._target.writers, self._chunks)

    def _persist(self) -> None:
        """Opens the file, lets the writers work, makes the file durable."""
        assert self._target is not None
        try:
            self._open(self._target)
        except Exception as error:
            self._fail(error)
        writers = [
            threading.Thread(target=self._write, name=f"autockpt-write-{i}", daemon=True)
            for i in range(self._writers - 1)
        ]
        for thread in writers:
            thread.start()
        self._write()
        for thread in writers:
            thread.join()
        self.settled.wait()
        self._finish()

    def _open(self, target: PersistTarget) -> None:
        self._began_s = time.monotonic()
        if self._cancelled:  # else the directory would come again after its removal
            return
        self._moved_s = self._began_s
        target.prepare()
        encoded = target.codec != "none"
        header = align_header(self._chunks)
        self._file = create_image(
            target.path,
            image_bytes=len(self._image),
            encoded=encoded,
            header_bytes=header,
            direct=target.direct_io,
            reuse=target.spare(),
        )
        if encoded:
            self._encoded = _Encoded(next_offset=header)

    def _write(self) -> None:
        """A writer: until there are no more chunks."""
        frames = FrameBuffer()
        while (index := self._ready.get()) is not None:
            if self._cancelled or self._failure is not None or self._file is None:
                self._abandon()
                self._drained(index)  # or the trainer would wait for room for the next ones
                continue
            start = index * self._chunk_bytes
            stop = min(start + self._chunk_bytes, len(self._image))
            try:
                if self._encoded is not None:
                    self._write_encoded(index, start, stop, frames)
                else:
                    if not self._file.header_first:
                        start = max(start, PAGE_BYTES)  # the page with the header comes last
                    self._file.write_at(start, self._image[start:stop])
            except Exception as error:
                self._fail(error)
            self._moved_s = time.monotonic()
            self._drained(index)

    def _drained(self, index: int) -> None:
        if self._drain is not None:
            self._drain.done(index)

    def _write_encoded(self, index: int, start: int, stop: int, frames: FrameBuffer) -> None:
        assert self._target is not None
        assert self._encoded is not None
        assert self._file is not None
        base = self._target.base
        data, target = self._image[start:stop], self._target
        with self._reading(), base.chunk(index) if base else contextlib.nullcontext() as old:
            against = base.index.digests[index] if base is not None and old is not None else ""
            ranges = target.codec_ranges
            frame, place = encode_chunk(
                codec_of(target.codec), data, frames,
                runs=runs_of(ranges, start, stop) if ranges else [Run(len(data))],
                digest=self._digests[index], old=old, against=against,
            )  # fmt: skip
        with self._encoded.lock:
            offset = self._encoded.next_offset
            self._encoded.next_offset += page_align(place.length)
            self._encoded.chunks[index] = replace(place, offset=offset if place.length else 0)
        if place.length:
            self._file.write_at(offset, frames.aligned(frame) if frame else data)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """The slot keeps what it holds while this lasts.  Raises AutockptError once cancelled."""
        with self._lock:
            if self._cancelled:
                raise AutockptError("cancelled")
            self._encoding += 1
        try:
            yield
        finally:
            with self._lock:
                self._encoding -= 1
                self._lock.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
        self._abandon()

    def _abandon(self) -> None:
        """Some chunk will not be written: no writer waits for it."""
        file = self._file
        if file is not None:
            file.abandon()

    def _finish(self) -> None:
        """After all writers and all digests."""
        outcome: ShardOutcome | None = None
        if self._failure is None and not self._is_cancelled():
            try:
                made = self._make_durable()
                if self._target is not None and not self._is_cancelled():
                    self._target.finish(made)
                outcome = made
            except Exception as error:
                self._failure = error
        if outcome is None:
            self._discard()
        with self._lock:  # nothing is called once `cancel` has returned
            if self._cancelled:
                return
            if outcome is not None:
                self._on_persisted(outcome)
            else:
                self._on_failed(self._failure or AutockptError("the shard was not written"))

    def _discard(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.discard()

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
            header = encoded_header(stored, length, align_header(self._chunks))
            if not self._file.header_first:
                self._file.write_at(0, FrameBuffer().aligned(header))
        elif not self._file.header_first:
            self._file.write_at(0, self._image[:PAGE_BYTES])
        if self._is_cancelled():
            raise AutockptError("cancelled")
        file, self._file = self._file, None
        self._moved_s = time.monotonic()
        file.finish(length)
        return ShardOutcome(
            stored_bytes=length, write_s=time.monotonic() - self._began_s, stored=stored,
            objection=file.objection,
        )  # fmt: skip
