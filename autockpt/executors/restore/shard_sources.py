"""The shards of a generation, wherever they stand: slots of this node, files of a commit.

A restore opens some of them, learns from their heads what they hold, and reads verified chunks.
"""

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from autockpt.executors.image.container import ImageIndex, read_trailer
from autockpt.executors.linux.memory import Arena
from autockpt.executors.restore.cooperative_read import CooperativeRead
from autockpt.executors.storage.catalogue import load_index, open_shard
from autockpt.executors.storage.directory.records import CommitFile, read_commit
from autockpt.executors.storage.places.store import read_patiently
from autockpt.values.errors import CorruptCheckpointError, StorageError
from autockpt.values.policy_keys.paths import is_store_url

_T = TypeVar("_T")
Passing = Callable[["ChunkSource", "SharedChunks"], "ChunkSource"]
"""Opens a shard of which other nodes need chunks, too; given the shard in the store."""
COPIERS = 2
"""Threads that copy from memory: two saturate it where one does not."""


class ChunkSource(Protocol):
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
        """Announce chunks to be read, so that remote ones may begin to come."""

    def read(self, chunk: int, memory: memoryview) -> memoryview:
        """The raw bytes of a chunk, in `memory` or elsewhere; one memory per thread.

        Raises CorruptCheckpointError when they do not match.
        """

    def close(self) -> None:
        """Lets go."""


class SlotSource:
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


class PatientSource:
    """A shard in an object store, which is asked again while it does not answer."""

    def __init__(self, folder: str, source: ChunkSource) -> None:
        self._folder, self._source = folder, source
        self.index, self.workers = source.index, source.workers

    @property
    def room_bytes(self) -> int:
        """See `ChunkSource`."""
        return self._source.room_bytes

    def head(self) -> memoryview | None:
        """See `ChunkSource`."""
        return read_patiently(self._folder, self._source.head)

    def expect(self, chunks: Sequence[int]) -> None:
        """See `ChunkSource`."""
        self._source.expect(chunks)

    def read(self, chunk: int, memory: memoryview) -> memoryview:
        """See `ChunkSource`."""
        return read_patiently(self._folder, lambda: self._source.read(chunk, memory))

    def close(self) -> None:
        """See `ChunkSource`."""
        self._source.close()


@dataclass(frozen=True, slots=True)
class SharedChunks:
    """The chunks of a shard that one node reads for all that need them."""

    shard: int
    """The first replica, which is read: all ask for its chunks."""
    chunks: Collection[int]
    """Their numbers, the same in both."""
    is_needed: bool
    """Every node needs all of them."""


@dataclass(frozen=True, slots=True)
class Together:
    """Ranks of a node that read the same shards at the same time."""

    memory: Arena
    ranks: tuple[int, ...]
    rank: int
    """This one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSources:
    """The shards of one generation, as far as this rank can reach them."""

    home: int
    """The shard whose private state (random state, loader, objects) this rank takes."""
    count: int
    """Shards of the generation."""
    world_size: int
    """Ranks that restore."""
    within_reach: Sequence[int]
    """Shards that can be opened and are no replica of another one, ascending."""
    open: Callable[[int], ChunkSource]
    """Opens a shard; the caller closes it.  Raises CorruptCheckpointError or StorageError."""
    turn: float = 0.0
    """Where in its reads this rank begins, 0 to 1: others that read the same begin elsewhere."""
    near: Sequence[int] = ()
    """Shards that cost nothing to read: in the memory of this node."""
    complete: bool = True
    """The shards within reach hold all that the generation holds."""
    together: CooperativeRead | None = None
    """By which ranks of this node read every chunk once."""
    first_chunks: Sequence[int] = ()
    """By shard the number of its first chunk among all; for `together`."""

    @property
    def regrouped(self) -> bool:
        """Another number of ranks wrote them."""
        return self.world_size != self.count


def one_shard(source: ChunkSource) -> ShardSources:
    """For a rank that needs nothing but what one shard holds."""
    return ShardSources(home=0, count=1, world_size=1, within_reach=(0,), open=lambda _: source)


def shards_of_node(
    rank: int,
    own: SlotSource,
    neighbours: Mapping[int, tuple[Arena, int]],
    folder: str = "",
) -> ShardSources:
    """The slots of a node that hold one generation: this rank's own, and its neighbours'.

    Other shards come from the disk, if the generation is durable.  `neighbours`: (slot, capacity of
    its image) by rank; the caller closes them.
    """
    count, near = own.index.world_size, sorted({rank, *neighbours})
    disk: ShardSources | None = None
    with contextlib.suppress(OSError, CorruptCheckpointError, StorageError):
        disk = shards_on_disk(folder, rank, count) if folder else None

    def open_one(shard: int) -> ChunkSource:
        if shard == rank:
            return own
        if shard in neighbours:
            return _neighbour(shard, *neighbours[shard], own.index)
        assert disk is not None
        return disk.open(shard)

    return ShardSources(
        home=rank,
        count=count,
        world_size=count,
        within_reach=sorted({*near, *(() if disk is None else disk.within_reach)}),
        open=open_one,
        near=near,
        complete=disk is not None or len(near) == count,
    )


def _neighbour(rank: int, slot: Arena, capacity: int, own: ImageIndex) -> SlotSource:
    """The slot of another rank.  Raises CorruptCheckpointError when it holds something else."""
    index = read_trailer(slot.view[capacity:])
    if index is None or (index.run_id, index.generation) != (own.run_id, own.generation):
        raise CorruptCheckpointError(f"memory: rank {rank} does not hold {own.generation} any more")
    return SlotSource(slot, index)


def shards_on_disk(
    folder: str,
    rank: int,
    world_size: int,
    root: str = "",
    together: Together | None = None,
    *,
    patient: bool = False,
    passing: Passing | None = None,
) -> ShardSources:
    """The shard files of a commit, for one of `world_size` ranks; each is opened when needed.

    `root`: what this rank's own shard must be; "": not known.  `patient`: a store that does not
    answer is asked again for minutes.  `passing`: for shards that one node reads for all that need
    them.  Raises CorruptCheckpointError or StorageError.
    """

    def ask(read: Callable[[], _T]) -> _T:
        return read_patiently(folder, read) if patient else read()

    def open_one(shard: int) -> ChunkSource:
        source = ask(lambda: _open_file(folder, shard, commit))
        if patient and is_store_url(folder):
            source = PatientSource(folder, source)
        shared = None if passing is None else sharing.of(shard, source.index)
        return source if passing is None or shared is None else passing(source, shared)

    commit = ask(lambda: read_commit(os.path.join(folder, "COMMIT")))
    records = commit.records
    # More ranks than before: what is private to a rank comes from the first one.
    home = rank if rank < len(records) else 0
    if root not in ("", records[home].get("root")):
        raise CorruptCheckpointError(f"{folder}: COMMIT names another shard of rank {rank}")
    counts = [int(record.get("chunks", 0)) for record in records]
    first_chunks = [0, *itertools.accumulate(counts)]
    cooperative: CooperativeRead | None = None
    sharing = _Sharing(folder, commit, regrouped=world_size != len(records))
    read_by_others = passing is not None and sharing.is_any
    if together is not None and all(counts) and not read_by_others:
        sizes = [int(record.get("chunk_bytes", 0)) for record in records]
        with contextlib.suppress(StorageError):  # too many or too large: every rank by itself
            cooperative = CooperativeRead(
                together.memory, together.ranks, together.rank,
                chunks=first_chunks[-1], chunk_bytes=max(sizes),
            )  # fmt: skip
    return ShardSources(
        home=home,
        count=len(records),
        world_size=world_size,
        within_reach=_one_of_each_layout(records),
        open=open_one,
        turn=rank / world_size,
        together=cooperative,
        first_chunks=first_chunks,
    )


class _Sharing:
    """Which chunks of a commit several nodes need, as far as its shards say.

    All do where ranks of several nodes divided what they hold alike.  Replicas have equal chunks,
    and one of them is read.  Where another number of ranks restores, they may need the same shards.
    """

    def __init__(self, folder: str, commit: CommitFile, *, regrouped: bool) -> None:
        self._folder, self._commit, self._regrouped = folder, commit, regrouped
        first = _first_of_each_layout(commit.records)
        self._first = [first[_layout(n, record)] for n, record in enumerate(commit.records)]
        self._replicas = Counter(self._first)

    @property
    def is_any(self) -> bool:
        """Some are."""
        across = any(record.get("across_nodes") for record in self._commit.records)
        return self._regrouped or across or len(self._replicas) < len(self._first)

    def of(self, shard: int, index: ImageIndex) -> SharedChunks | None:
        """The shared ones of a shard; None: there are none.

        Raises CorruptCheckpointError or StorageError.
        """
        across, first = bool(self._commit.records[shard].get("across_nodes")), self._first[shard]
        if not across and not self._regrouped and self._replicas[first] == 1:
            return None
        alike: Collection[int] = range(len(index.digests))
        if first != shard:
            other = load_index(self._folder, self._commit.records[first], self._commit)
            pairs = zip(index.digests, other.digests, strict=False)
            alike = frozenset(number for number, (a, b) in enumerate(pairs) if a == b)
        return SharedChunks(shard=first, chunks=alike, is_needed=across)


def _open_file(folder: str, shard: int, commit: CommitFile) -> ChunkSource:
    """A shard file; ranks that read together number the chunks of all shards by what COMMIT says.

    Raises CorruptCheckpointError or StorageError.
    """
    record = commit.records[shard]
    source = open_shard(folder, record, commit)
    index = source.index
    found = (len(index.digests), index.chunk_bytes)
    said = (record.get("chunks", found[0]), record.get("chunk_bytes", found[1]))
    if said != found:
        source.close()
        raise CorruptCheckpointError(
            f"{folder}: shard {shard} has {found[0]} chunks of {found[1]} bytes, COMMIT "
            f"says {said[0]} of {said[1]}"
        )
    return source


def _one_of_each_layout(records: Sequence[dict[str, Any]]) -> list[int]:
    """Return one shard per layout, the earliest: later ones are replicas on other nodes."""
    return sorted(_first_of_each_layout(records).values())


def _first_of_each_layout(records: Sequence[dict[str, Any]]) -> dict[str, int]:
    first: dict[str, int] = {}
    for shard, record in enumerate(records):
        first.setdefault(_layout(shard, record), shard)
    return first


def _layout(shard: int, record: dict[str, Any]) -> str:
    return str(record.get("layout_digest") or shard)
