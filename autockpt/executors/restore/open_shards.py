"""Shards that are open for one restore: their headers, and chunks that were read ahead."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from autockpt.executors.image.container import find_header, header_bytes, read_header
from autockpt.executors.image.dtypes import true_form
from autockpt.executors.image.layout.plan import EXTRA
from autockpt.executors.linux.memory import Arena
from autockpt.executors.restore.shard_sources import ChunkSource, ShardSources
from autockpt.executors.state import state_tree
from autockpt.executors.state.skeleton_schema import require_skeleton
from autockpt.executors.storage.shard_file import run_parallel
from autockpt.values.errors import CorruptCheckpointError

AHEAD = 4
"""Chunks that a rank reads while it plans what to take: about as many as it has time for."""
HEADER_READERS = 8
"""Threads that open shards to learn what they hold: each waits for storage twice a shard."""


class ReadAhead:
    """A chunk source that keeps chunks which were read before they were asked for."""

    def __init__(self, source: ChunkSource) -> None:
        self._source = source
        self.index, self.workers = source.index, source.workers
        self._held: dict[int, tuple[memoryview, Arena]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def room_bytes(self) -> int:
        """As the source says."""
        return self._source.room_bytes

    def head(self) -> memoryview | None:
        """As the source gives it."""
        return self._source.head()

    def expect(self, chunks: Sequence[int]) -> None:
        """Tells the source."""
        self._source.expect(chunks)

    def hold(self, chunk: int) -> memoryview:
        """A verified chunk in a buffer of its own, which stays until the source is closed."""
        if chunk not in self._held:
            buffer = Arena.anonymous(self.room_bytes)
            self._held[chunk] = self._source.read(chunk, buffer.view), buffer
        return self._held[chunk][0]

    def read(self, chunk: int, memory: memoryview) -> memoryview:
        """A chunk that is held already, or one from the source."""
        if chunk in self._held:
            return self._held[chunk][0]
        return self._source.read(chunk, memory)

    def begin(self, chunks: Iterable[int], read: Callable[[int], object]) -> None:
        """Calls `read` for these chunks one after the other, in another thread, until `end`."""

        def work() -> None:
            # An error comes again when the chunk is needed.
            with contextlib.suppress(Exception):
                for chunk in chunks:
                    if not self._stop.is_set():
                        read(chunk)

        self._thread = threading.Thread(target=work, name="autockpt-first-chunks", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Reads no further chunk ahead, and waits for the one that is being read."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Lets the held chunks and the source go."""
        self.end()
        for _, buffer in self._held.values():
            buffer.close()
        self._source.close()


class OpenedShard:
    """A shard whose header is known."""

    def __init__(self, source: ChunkSource) -> None:
        """Raises CorruptCheckpointError or StorageError."""
        self.chunks = ReadAhead(source)
        self.head = source.head() or memoryview(b"")
        """The first bytes of the image; all of its header, or nothing."""
        image_bytes = source.index.image_bytes
        if self.head:
            size = header_bytes(self.head, image_bytes)
            self.header = read_header(bytes(self.head[:size]), image_bytes)
        else:
            self.header = find_header(self.chunks.hold, image_bytes)

    def skeleton(self) -> Any:
        """The state's skeleton.  Raises CorruptCheckpointError."""
        place = self.header.tensors.get(EXTRA)
        if place is None:
            raise CorruptCheckpointError(f"image: its {EXTRA} is missing")
        true_form(self.header, EXTRA)
        return parse_skeleton(self._bytes(place.start, place.stop))

    def private(self) -> dict[str, Any]:
        """{"progress", "rng"} of the rank that wrote it.  Raises CorruptCheckpointError."""
        skeleton = self.skeleton()
        parts = {part: skeleton[part] for part in ("progress", "rng")}
        tensors = {name: self._tensor(name) for name in state_tree.tensor_names([*parts.values()])}
        return {part: state_tree.decode(value, tensors) for part, value in parts.items()}

    def _tensor(self, name: str) -> torch.Tensor:
        name = self.header.aliases.get(name, name)
        if name not in self.header.tensors:
            raise CorruptCheckpointError(f"{name}: is named in the state and not in the image")
        place = self.header.tensors[name]
        dtype, shape = true_form(self.header, name)
        data = bytearray(self._bytes(place.start, place.stop))
        return (
            torch.frombuffer(data, dtype=dtype).view(shape)
            if data
            else torch.empty(shape, dtype=dtype, device="cpu")
        )

    def _bytes(self, start: int, stop: int) -> bytes:
        if stop <= len(self.head):
            return bytes(self.head[start:stop])
        size = self.chunks.index.chunk_bytes
        return b"".join(
            bytes(self.chunks.hold(chunk)[max(0, start - chunk * size) : stop - chunk * size])
            for chunk in range(start // size, -(-stop // size))
        )

    def close(self) -> None:
        """Lets its chunks and the shard go."""
        self.chunks.close()


def parse_skeleton(text: bytes) -> Any:
    """The state's skeleton, as it stands in EXTRA.  Raises CorruptCheckpointError."""
    try:
        skeleton = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"image: its {EXTRA} is malformed: {error!r:.200}") from None
    require_skeleton(skeleton, f"image: its {EXTRA}")
    return skeleton


class OpenShards:
    """The open shards of a generation; threads read chunks through buffers of their own."""

    def __init__(self, sources: ShardSources) -> None:
        self.sources = sources
        self._opened: dict[int, OpenedShard] = {}
        self._mine = threading.local()
        self._buffers: list[Arena] = []

    def open(self, shard: int) -> OpenedShard:
        """A shard, opened once.  Raises CorruptCheckpointError or StorageError."""
        if shard not in self._opened:
            self._opened[shard] = OpenedShard(self.sources.open(shard))
        return self._opened[shard]

    def open_all(self, shards: Sequence[int]) -> None:
        """Opens several at a time.  Raises CorruptCheckpointError or StorageError."""
        found: dict[int, OpenedShard] = {}

        def look(number: int) -> None:
            found[number] = OpenedShard(self.sources.open(shards[number]))

        try:
            run_parallel(range(len(shards)), look, workers=HEADER_READERS)
        finally:
            self._opened |= {shards[number]: opened for number, opened in found.items()}

    def keep_only(self, shard: int) -> None:
        """Closes all others."""
        for other in set(self._opened) - {shard}:
            self._opened.pop(other).close()

    @property
    def image_bytes(self) -> int:
        """Bytes of the images that are open."""
        return sum(opened.chunks.index.image_bytes for opened in self._opened.values())

    def read_ahead(self, shard: int) -> None:
        """Begins to read the first chunks of a shard, which are most likely needed."""
        sources, chunks = self.sources, self.open(shard).chunks
        if not chunks.room_bytes or shard not in sources.within_reach:
            return  # all of it is in memory, or a replica of another rank is taken
        group = sources.together

        def read(chunk: int) -> None:
            if group is None:
                chunks.hold(chunk)
            else:
                number = sources.first_chunks[shard] + chunk
                group.read_ahead(number, lambda _, place: self.read(shard, chunk, place))

        chunks.begin(range(min(AHEAD, len(chunks.index.digests))), read)

    def end_read_ahead(self) -> None:
        """Reads nothing ahead any more."""
        for opened in self._opened.values():
            opened.chunks.end()

    def read(self, shard: int, chunk: int, place: memoryview | None = None) -> memoryview:
        """A verified chunk, in `place` if it fits; valid until the next call of this thread.

        Raises CorruptCheckpointError or StorageError.
        """
        chunks = self._opened[shard].chunks
        if place is None or len(place) < chunks.room_bytes:
            place = self._buffer(chunks.room_bytes)
        return chunks.read(chunk, place)

    def _buffer(self, nbytes: int) -> memoryview:
        """Memory of this thread, enough for a chunk of any shard so far."""
        buffer: Arena | None = getattr(self._mine, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes:
            self._mine.buffer = buffer = Arena.anonymous(nbytes)
            self._buffers.append(buffer)
        return buffer.view

    def close(self) -> None:
        """Lets the buffers and the shards go, and the ranks that read with this one."""
        self.end_read_ahead()
        if self.sources.together is not None:
            self.sources.together.leave()
        for arena in self._buffers:
            arena.close()
        for opened in self._opened.values():
            opened.close()
