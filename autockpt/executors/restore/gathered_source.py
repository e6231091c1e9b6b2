"""The shards of a generation from the memory of any node, or from their files.

Another number of ranks wrote them, or ranks of several nodes divided what they hold alike.  The
keeper brings chunks that other nodes have into memory of this node; here they are checked once
more while they are copied.  A shard that no memory gives is read from its file, where there is one.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Sequence
from typing import Protocol

from autockpt.executors.image.container import ImageIndex, read_trailer
from autockpt.executors.keeper.wire import ChunksLent, GatheringBegan, LostShardError
from autockpt.executors.linux.memory import Arena
from autockpt.executors.restore.shard_sources import (
    ChunkSource,
    Passing,
    ShardSources,
    SharedChunks,
    shards_on_disk,
)
from autockpt.executors.storage.places.choose import place_of
from autockpt.values.errors import CorruptCheckpointError, StorageError
from autockpt.values.generation import Generation

PIECE = 16
"""Chunks of one request to pass on: the first ones are copied while later ones come."""
FETCHED = 4
"""Threads that read what comes from other nodes: most of their time they wait."""


class Keeper(Protocol):
    """A keeper's part in one order to gather."""

    def want(self, shard: int, chunks: tuple[int, ...], *, elsewhere: bool) -> int:
        """Asks for chunks of a shard; the number of the request."""

    def take(self, number: int) -> tuple[ChunksLent, Arena]:
        """The answer; the caller closes the memory.

        Raises CorruptCheckpointError: none came, LostShardError: nor will it.
        """


class _Lent:
    """Chunks of a shard, which the keeper brings when they are asked for."""

    index: ImageIndex
    """Of the shard; set before anything is read."""

    def __init__(self, keeper: Keeper, shard: int) -> None:
        self._keeper, self._shard = keeper, shard
        self._lock = threading.Lock()
        self._requests: dict[int, int] = {}
        """By chunk the request that brings it."""
        self._refused: dict[int, CorruptCheckpointError] = {}
        """By chunk why it does not come."""
        self._here: dict[int, Arena] = {}
        self._arenas: dict[int, Arena] = {}
        """By node that sent it."""

    def expect(self, chunks: Sequence[int]) -> None:
        """They are brought from now on, all of them in one request."""
        with self._lock:
            asked = (self._here, self._requests, self._refused)
            missing = [c for c in chunks if not any(c in known for known in asked)]
            if missing:
                number = self._keeper.want(self._shard, tuple(missing), elsewhere=False)
                self._requests |= dict.fromkeys(missing, number)

    def take(self, chunk: int) -> memoryview:
        """A view, verified.  Raises CorruptCheckpointError."""
        return self._checked(chunk, self._bring(chunk))

    def _bring(self, chunk: int) -> Arena:
        self.expect([chunk])
        with self._lock:
            if chunk in self._requests:
                self._end_request(self._requests[chunk])
            if chunk in self._refused:
                raise self._refused[chunk]
            return self._here[chunk]

    def _end_request(self, number: int) -> None:
        """Its answer is of all its chunks, and comes once."""
        chunks = [c for c, asked in self._requests.items() if asked == number]
        try:
            self._here |= dict.fromkeys(chunks, self._take(number))
        except CorruptCheckpointError as error:
            self._refused |= dict.fromkeys(chunks, error)
        for chunk in chunks:
            del self._requests[chunk]

    def _take(self, number: int) -> Arena:
        lent, arena = self._keeper.take(number)
        if lent.node in self._arenas:
            arena.close()
        return self._arenas.setdefault(lent.node, arena)

    def _checked(self, chunk: int, arena: Arena) -> memoryview:
        start, stop = self.index.chunk_range(chunk)
        data = arena.view[start:stop]
        self.index.check(chunk, data, source="memory")
        return data

    def close(self) -> None:
        """Lets the memory go."""
        for arena in self._arenas.values():
            arena.close()


class LentSource(_Lent):
    """A shard in the memory of nodes."""

    workers, room_bytes = FETCHED, 0

    def __init__(self, keeper: Keeper, shard: int, generation: Generation) -> None:
        """Raises CorruptCheckpointError when no memory gives it."""
        super().__init__(keeper, shard)
        self._generation = generation
        lent, arena = keeper.take(keeper.want(shard, (0,), elsewhere=False))
        self.node = lent.node
        self.index = self._described(lent, arena)
        self._arenas[lent.node] = arena
        self._here[0] = arena

    def _described(self, lent: ChunksLent, arena: Arena) -> ImageIndex:
        index = read_trailer(arena.view[lent.image_bytes :])
        if index is None or (index.rank, index.generation) != (self._shard, self._generation):
            arena.close()
            what = f"what node {lent.node} has of rank {self._shard} is not {self._generation}"
            raise LostShardError(f"memory: {what}", self._shard)
        return index

    def head(self) -> memoryview | None:
        """A view, verified; None when it is longer than the chunk that came with it."""
        if not 0 < self.index.head_bytes <= self.index.chunk_bytes:
            return None
        data = self._here[0].view[: self.index.head_bytes]
        try:
            self.index.check_head(data, source="memory")
        except CorruptCheckpointError:
            return None  # what it belongs to is read as a chunk, from elsewhere if need be
        return data

    def read(self, chunk: int, memory: memoryview) -> memoryview:
        """A view, verified; from another memory when this one is damaged.

        Raises LostShardError where no memory has it whole.
        """
        try:
            return self._first(chunk)
        except CorruptCheckpointError as error:
            try:
                return self._elsewhere(chunk)
            except LostShardError as other:
                if isinstance(error, LostShardError):
                    raise LostShardError(f"{error}; {other}", self._shard) from error
                raise CorruptCheckpointError(f"{error}; {other}") from error

    def _first(self, chunk: int) -> memoryview:
        arena = self._bring(chunk)
        try:
            return self._checked(chunk, arena)
        except CorruptCheckpointError as error:
            raise LostShardError(str(error), self._shard) from error

    def _elsewhere(self, chunk: int) -> memoryview:
        with self._lock:
            number = self._keeper.want(self._shard, (chunk,), elsewhere=True)
            arena = self._take(number)
        return self._checked(chunk, arena)


class PassedOnSource:
    """A shard in an object store, of which one node reads each chunk for all that need it.

    Where the keeper cannot bring a chunk, this rank reads it from the store itself.
    """

    workers, room_bytes = FETCHED, 0

    def __init__(
        self, keeper: Keeper, alone: Keeper, stored: ChunkSource, shared: SharedChunks
    ) -> None:
        """`alone`: reads what only ranks of this node need.  `stored`: the shard in the store."""
        self.index = stored.index
        self._stored, self._sharing = stored, shared
        self._shared = _Lent(keeper, shared.shard)
        self._alone = _Lent(alone, stored.index.rank)
        for lent in (self._shared, self._alone):
            lent.index = stored.index
        self._mine = threading.local()

    def head(self) -> memoryview | None:
        """Verified; out of its chunk, where that is needed by all."""
        whole = 0 < self.index.head_bytes <= self.index.chunk_bytes
        if not whole or not self._sharing.is_needed or 0 not in self._sharing.chunks:
            return self._stored.head()
        data = self.read(0, memoryview(b""))[: self.index.head_bytes]
        self.index.check_head(data, source="memory")
        return data

    def expect(self, chunks: Sequence[int]) -> None:
        """They are brought from now on; a request ends when its last chunk is there."""
        shared = [chunk for chunk in chunks if chunk in self._sharing.chunks]
        for start in range(0, len(shared), PIECE):
            self._shared.expect(shared[start : start + PIECE])
        self._alone.expect(sorted(set(chunks) - set(shared)))

    def read(self, chunk: int, memory: memoryview) -> memoryview:
        """A view, verified; from the store when it does not come, or is damaged."""
        lent = self._shared if chunk in self._sharing.chunks else self._alone
        with contextlib.suppress(CorruptCheckpointError):
            return lent.take(chunk)
        buffer: Arena | None = getattr(self._mine, "buffer", None)
        if buffer is None:
            buffer = self._mine.buffer = Arena.anonymous(self._stored.room_bytes)
        return self._stored.read(chunk, buffer.view)

    def close(self) -> None:
        """Lets the memory and the file go."""
        self._shared.close()
        self._alone.close()
        self._stored.close()


def passed_on(keeper: Keeper, alone: Keeper) -> Passing:
    """How shards are opened that several nodes need; see `PassedOnSource`."""
    return lambda stored, shared: PassedOnSource(keeper, alone, stored, shared)


def gathered_shards(
    rank: int,
    world_size: int,
    generation: Generation,
    began: GatheringBegan,
    keeper: Keeper,
    folder: str,
    passing: Passing | None = None,
) -> tuple[ShardSources, set[str]]:
    """All shards of one generation.

    `folder`: of its files, which need not be there, and are asked for only where no memory has a
    shard: storage may hang.  `passing`: see `shards_on_disk`.  Beside the shards the kinds of
    source that were used so far: memory, peer, disk.  Shares that ranks of other nodes hold for
    this one are memory, as they were.
    """
    used: set[str] = set()
    count = len(began.layouts)

    @functools.cache
    def disk() -> ShardSources | None:
        with contextlib.suppress(OSError, CorruptCheckpointError, StorageError):
            if place_of(folder).exists(os.path.join(folder, "COMMIT")):
                return shards_on_disk(folder, rank, world_size, passing=passing)
        return None

    def open_one(shard: int) -> ChunkSource:
        try:
            source = LentSource(keeper, shard, generation)
        except CorruptCheckpointError:
            files = disk()
            if files is None:
                raise
            used.add("disk")
            return files.open(shard)
        as_it_was = count == world_size and shard != rank
        used.add("memory" if as_it_was or shard in began.near else "peer")
        return source

    shards = ShardSources(
        # More ranks than before: what is private to a rank comes from the first one.
        home=rank if rank < count else 0,
        count=count,
        world_size=world_size,
        within_reach=_one_of_each(began),
        open=open_one,
        turn=rank / world_size,
    )
    return shards, used


def farthest(used: set[str]) -> str:
    """The slowest kind of source that was used."""
    return next(kind for kind in ("disk", "parity", "peer", "memory") if kind in used)


def _one_of_each(began: GatheringBegan) -> list[int]:
    """Return one shard per layout: a near one, else the first."""
    found: dict[str, int] = {}
    for shard in sorted(range(len(began.layouts)), key=lambda s: (s not in began.near, s)):
        found.setdefault(began.layouts[shard] or str(shard), shard)
    return sorted(found.values())
