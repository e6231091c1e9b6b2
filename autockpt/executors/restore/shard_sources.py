"""The shards of a generation, wherever they stand: slots of this node, files of a commit.

Whoever restores opens some of them, learns from their heads what they hold, and reads chunks that
were verified.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autockpt.executors.image.container import (
    ImageIndex,
    find_header,
    header_bytes,
    read_header,
    read_trailer,
)
from autockpt.executors.image.dtypes import true_form
from autockpt.executors.image.layout.plan import EXTRA
from autockpt.executors.linux.memory import Arena
from autockpt.executors.restore.cooperative_read import CooperativeRead
from autockpt.executors.state import state_tree
from autockpt.executors.state.skeleton_schema import require_skeleton
from autockpt.executors.storage.catalogue import ChunkSource, open_shard
from autockpt.executors.storage.directory import read_commit
from autockpt.values.errors import CorruptCheckpointError, StorageError

COPIERS = 2
"""Threads that copy from memory: two saturate it where one does not."""


class Chunks(Protocol):
    """Verified chunks of one image, from memory or storage."""

    index: ImageIndex
    workers: int
    """Threads that should read at the same time."""

    @property
    def room_bytes(self) -> int:
        """Memory that `read` needs, page-aligned; 0: none, it shows what is there."""

    def head(self) -> memoryview | None:
        """Header and boundary group, verified; None when only whole chunks can be verified."""

    def expect(self, chunks: Sequence[int]) -> None:
        """These will be read; what has to come from afar may begin to."""

    def read(self, chunk: int, memory: memoryview) -> memoryview:
        """The raw bytes of a chunk, in `memory` or elsewhere; one memory per thread.

        Raises CorruptCheckpointError when they do not match.
        """

    def close(self) -> None:
        """Lets go."""


class SlotChunks:
    """The image in a slot, checked against its trailer's digests."""

    workers, room_bytes = COPIERS, 0

    def __init__(self, arena: Arena, index: ImageIndex) -> None:
        self._arena = arena
        self.index = index

    def head(self) -> memoryview | None:
        """A view of the slot, verified."""
        if not self.index.head_bytes:
            return None
        data = self._arena.view[: self.index.head_bytes]
        self.index.check_head(data, source="memory")
        return data

    def expect(self, chunks: Sequence[int]) -> None:
        """All of them are here."""

    def read(self, chunk: int, memory: memoryview) -> memoryview:
        """A view of the slot, verified."""
        start, stop = self.index.chunk_range(chunk)
        data = self._arena.view[start:stop]
        self.index.check(chunk, data, source="memory")
        return data

    def close(self) -> None:
        """The slot stays."""


def open_disk(folder: str, record: dict[str, Any]) -> ChunkSource:
    """The shard file of a commit.  Raises CorruptCheckpointError or StorageError."""
    commit = read_commit(f"{folder}/COMMIT")
    return open_shard(folder, record, commit)


@dataclass(frozen=True, slots=True)
class Together:
    """Ranks of a node that read the same shards at the same time."""

    memory: Arena
    ranks: tuple[int, ...]
    rank: int
    """This one."""


class ShardSources(Protocol):
    """The shards of one generation, as far as this rank can reach them."""

    @property
    def home(self) -> int:
        """The shard whose private state (random state, loader, objects) this rank takes."""

    @property
    def count(self) -> int:
        """Of the generation."""

    @property
    def complete(self) -> bool:
        """Those within reach hold all that the generation holds."""

    @property
    def near(self) -> Sequence[int]:
        """Those that cost nothing to read: in the memory of this node."""

    @property
    def within_reach(self) -> Sequence[int]:
        """All that can be opened, ascending."""

    @property
    def world_size(self) -> int:
        """Ranks that restore."""

    @property
    def regrouped(self) -> bool:
        """Another number of ranks wrote them."""

    @property
    def together(self) -> CooperativeRead | None:
        """By which ranks of this node read every chunk once."""

    @property
    def first_chunks(self) -> Sequence[int]:
        """By shard the number of its first chunk among all; for `together`."""

    def open(self, shard: int) -> Chunks:
        """One of them; the caller closes it.  Raises CorruptCheckpointError, StorageError."""


class Alone:
    """Shards that this rank reads by itself."""

    regrouped, complete = False, True
    near: Sequence[int] = ()
    together: CooperativeRead | None = None
    first_chunks: Sequence[int] = ()


class OneShard(Alone):
    """A rank that needs nothing but what one shard holds."""

    home, count, world_size = 0, 1, 1
    within_reach: Sequence[int] = (0,)

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def open(self, shard: int) -> Chunks:
        """The only one."""
        return self._chunks


class NodeSource(Alone):
    """The slots of a node that hold one generation: this rank's own, and its neighbours'.

    What they lack comes from the disk, where the generation is durable.
    """

    def __init__(
        self,
        rank: int,
        own: SlotChunks,
        neighbours: Mapping[int, tuple[Arena, int]],
        folder: str = "",
    ) -> None:
        """`neighbours`: (slot, capacity of its image) by rank; the caller closes them."""
        self.home = rank
        self.count = self.world_size = own.index.world_size
        self._own, self._neighbours = own, neighbours
        self.near: Sequence[int] = sorted({rank, *neighbours})
        self._disk: DiskSource | None = None
        with contextlib.suppress(OSError, CorruptCheckpointError, StorageError):
            self._disk = DiskSource(folder, rank, self.world_size) if folder else None
        self.complete = self._disk is not None or len(self.near) == self.count
        on_disk = () if self._disk is None else self._disk.within_reach
        self.within_reach: Sequence[int] = sorted({*self.near, *on_disk})

    def open(self, shard: int) -> Chunks:
        """One of them.  Raises CorruptCheckpointError when it holds something else."""
        if shard == self.home:
            return self._own
        if shard not in self._neighbours:
            assert self._disk is not None
            return self._disk.open(shard)
        arena, capacity = self._neighbours[shard]
        index, own = read_trailer(arena.view[capacity:]), self._own.index
        if index is None or (index.run_id, index.generation) != (own.run_id, own.generation):
            raise CorruptCheckpointError(
                f"memory: rank {shard} does not hold {own.generation} any more"
            )
        return SlotChunks(arena, index)


class DiskSource(Alone):
    """The shard files of a commit, for one of `world_size` ranks; each is opened when needed."""

    def __init__(
        self,
        folder: str,
        rank: int,
        world_size: int,
        root: str = "",
        together: Together | None = None,
    ) -> None:
        """`root`: what this rank's own shard must be; "" if nobody says.

        Raises CorruptCheckpointError or StorageError.
        """
        self._folder = folder
        self._commit = read_commit(os.path.join(folder, "COMMIT"))
        self.count = len(self._commit.records)
        self.within_reach: Sequence[int] = _one_of_each_layout(self._commit.records)
        self.world_size = world_size
        self.regrouped = world_size != self.count
        # More ranks than before: what is private to a rank comes from the first one.
        self.home = rank if rank < len(self._commit.records) else 0
        if root not in ("", self._commit.records[self.home].get("root")):
            raise CorruptCheckpointError(f"{folder}: COMMIT names another shard of rank {rank}")
        counts = [int(record.get("chunks", 0)) for record in self._commit.records]
        self.first_chunks: Sequence[int] = [0, *itertools.accumulate(counts)]
        self.together: CooperativeRead | None = None
        if together is not None and all(counts):
            sizes = [int(record.get("chunk_bytes", 0)) for record in self._commit.records]
            with contextlib.suppress(StorageError):  # too many or too large: everybody alone
                self.together = CooperativeRead(
                    together.memory, together.ranks, together.rank,
                    chunks=self.first_chunks[-1], chunk_bytes=max(sizes),
                )  # fmt: skip

    def open(self, shard: int) -> Chunks:
        """One of them; the caller closes it.  Raises CorruptCheckpointError, StorageError."""
        record = self._commit.records[shard]
        source = open_shard(self._folder, record, self._commit)
        index = source.index
        found = (len(index.digests), index.chunk_bytes)
        # Ranks that read together number the chunks of all shards by what COMMIT says.
        said = (record.get("chunks", found[0]), record.get("chunk_bytes", found[1]))
        if said != found:
            source.close()
            raise CorruptCheckpointError(
                f"{self._folder}: shard {shard} has {found[0]} chunks of {found[1]} bytes, COMMIT "
                f"says {said[0]} of {said[1]}"
            )
        return source


def _one_of_each_layout(records: Sequence[dict[str, Any]]) -> list[int]:
    """Shards without those that hold the same parts as an earlier one: replicas on other nodes."""
    first: dict[str, int] = {}
    for shard, record in enumerate(records):
        first.setdefault(str(record.get("layout_digest") or shard), shard)
    return sorted(first.values())


class OpenedShard:
    """A shard whose header is known; the chunks read for it are kept until they are put."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self._held: dict[int, tuple[memoryview, Arena]] = {}
        self.head = chunks.head() or memoryview(b"")
        """The first bytes of the image; all of its header, or nothing."""
        image_bytes = chunks.index.image_bytes
        if self.head:
            size = header_bytes(self.head, image_bytes)
            self.header = read_header(bytes(self.head[:size]), image_bytes)
        else:
            self.header = find_header(self.held, image_bytes)

    def held(self, chunk: int) -> memoryview:
        """A verified chunk in a buffer of its own."""
        if chunk not in self._held:
            buffer = Arena.anonymous(self.chunks.room_bytes)
            self._held[chunk] = self.chunks.read(chunk, buffer.view), buffer
        return self._held[chunk][0]

    def take(self, chunk: int) -> memoryview | None:
        """A chunk that was read before, or None."""
        return self._held[chunk][0] if chunk in self._held else None

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
            else torch.empty(shape, dtype=dtype)
        )

    def _bytes(self, start: int, stop: int) -> bytes:
        if stop <= len(self.head):
            return bytes(self.head[start:stop])
        size = self.chunks.index.chunk_bytes
        return b"".join(
            bytes(self.held(chunk)[max(0, start - chunk * size) : stop - chunk * size])
            for chunk in range(start // size, -(-stop // size))
        )

    def close(self) -> None:
        """Lets its buffers and the shard go."""
        for _, buffer in self._held.values():
            buffer.close()
        self.chunks.close()


def parse_skeleton(text: bytes) -> Any:
    """The state's skeleton, as it stands in EXTRA.  Raises CorruptCheckpointError."""
    try:
        skeleton = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"image: its {EXTRA} is malformed: {error!r:.200}") from None
    require_skeleton(skeleton, f"image: its {EXTRA}")
    return skeleton
