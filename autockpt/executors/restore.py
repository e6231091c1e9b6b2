"""Slot or shard file -> live state: every chunk verified while it is copied into place.

Restored tensors live in private memory, never in a slot or a mapped file.  The header says where
everything stands; what the live state expects and what the image holds must agree before a byte is
written.
"""

import bisect
import contextlib
import itertools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autockpt.executors import statetree
from autockpt.executors.catalogue import ChunkSource, load_index, shard_path
from autockpt.executors.directory import read_commit
from autockpt.executors.dtypes import true_form
from autockpt.executors.image import (
    ImageIndex,
    find_header,
    header_bytes,
    read_header,
    read_trailer,
)
from autockpt.executors.layout.plan import EXTRA
from autockpt.executors.memory import Arena
from autockpt.executors.persist import run_parallel
from autockpt.executors.sharding.holdings import Holding
from autockpt.executors.sharding.loading import Loading, Move, Want, moves_for
from autockpt.executors.sharding.names import plain_fqn
from autockpt.executors.sharding.optimizers import state_of
from autockpt.executors.sharding.pieces import Piece, Stored
from autockpt.executors.sharding.placing import seen_name
from autockpt.executors.sharding.rules import missing_rule
from autockpt.executors.sharding.saved import SavedGroup, SavedOptimizer
from autockpt.executors.sharding.together import ReadTogether
from autockpt.executors.sharding.wanted import Wanted
from autockpt.executors.state import LiveState
from autockpt.values.errors import ConfigError, CorruptCheckpointError, StorageError

COPIERS = 2
"""Threads that copy from memory: two saturate it where one does not."""
HEADER_READERS = 8
"""Threads that open shards to learn what they hold: each waits for storage twice a shard."""
KEPT_OPEN = 64
"""Shards whose headers are read at once and stay open; before it looks at more it closes them, and
opens again what it needs."""


class Chunks(Protocol):
    """Verified chunks of one image, from memory or storage."""

    index: ImageIndex
    workers: int
    """Threads that should read at the same time."""

    def head(self) -> memoryview | None:
        """Header and boundary group, verified; None when only whole chunks can be verified."""

    def read(self, chunk: int, buffer: Arena) -> memoryview:
        """The raw bytes of a chunk.  Raises CorruptCheckpointError when they do not match."""

    def buffer(self) -> Arena:
        """Memory that `read` may use; one per thread."""

    def close(self) -> None:
        """Lets go."""


class SlotChunks:
    """The image in a slot, checked against its trailer's digests."""

    workers = COPIERS

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

    def read(self, chunk: int, buffer: Arena) -> memoryview:
        """A view of the slot, verified."""
        start, stop = self.index.chunk_range(chunk)
        data = self._arena.view[start:stop]
        self.index.check(chunk, data, source="memory")
        return data

    def buffer(self) -> Arena:
        """Not used: chunks are read in place."""
        return Arena.anonymous(1)

    def close(self) -> None:
        """The slot stays."""


def open_disk(folder: str, record: dict[str, Any]) -> ChunkSource:
    """The shard file of a commit.  Raises CorruptCheckpointError or StorageError."""
    commit = read_commit(f"{folder}/COMMIT")
    return ChunkSource(shard_path(folder, record), load_index(folder, record, commit))


@dataclass(frozen=True, slots=True)
class Together:
    """Ranks of a node that read the same shards at the same time."""

    memory: Arena
    ranks: tuple[int, ...]
    rank: int
    """This one."""


class Shards(Protocol):
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
    def together(self) -> ReadTogether | None:
        """By which ranks of this node read every chunk once."""

    @property
    def first_chunks(self) -> Sequence[int]:
        """By shard the number of its first chunk among all; for `together`."""

    def open(self, shard: int) -> Chunks:
        """One of them; the caller closes it.  Raises CorruptCheckpointError, StorageError."""


class _Alone:
    """Shards that this rank reads by itself."""

    regrouped, complete = False, True
    near: Sequence[int] = ()
    together: ReadTogether | None = None
    first_chunks: Sequence[int] = ()


class OneShard(_Alone):
    """A rank that needs nothing but what one shard holds."""

    home, count, world_size = 0, 1, 1
    within_reach: Sequence[int] = (0,)

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def open(self, shard: int) -> Chunks:
        """The only one."""
        return self._chunks


class NodeShards(_Alone):
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
        self._disk: DiskShards | None = None
        with contextlib.suppress(OSError, CorruptCheckpointError, StorageError):
            self._disk = DiskShards(folder, rank, self.world_size) if folder else None
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


class DiskShards(_Alone):
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
        self.together: ReadTogether | None = None
        if together is not None and all(counts):
            sizes = [int(record.get("chunk_bytes", 0)) for record in self._commit.records]
            with contextlib.suppress(StorageError):  # too many or too large: everybody alone
                self.together = ReadTogether(
                    together.memory, together.ranks, together.rank,
                    chunks=self.first_chunks[-1], chunk_bytes=max(sizes),
                )  # fmt: skip

    def open(self, shard: int) -> Chunks:
        """One of them; the caller closes it.  Raises CorruptCheckpointError, StorageError."""
        record = self._commit.records[shard]
        index = load_index(self._folder, record, self._commit)
        found = (len(index.digests), index.chunk_bytes)
        # Ranks that read together number the chunks of all shards by what COMMIT says.
        said = (record.get("chunks", found[0]), record.get("chunk_bytes", found[1]))
        if said != found:
            raise CorruptCheckpointError(
                f"{self._folder}: shard {shard} has {found[0]} chunks of {found[1]} bytes, COMMIT "
                f"says {said[0]} of {said[1]}"
            )
        return ChunkSource(shard_path(self._folder, record), index)


def _one_of_each_layout(records: Sequence[dict[str, Any]]) -> list[int]:
    """Shards without those that hold the same parts as an earlier one: replicas on other nodes."""
    first: dict[str, int] = {}
    for shard, record in enumerate(records):
        first.setdefault(str(record.get("layout_digest") or shard), shard)
    return sorted(first.values())


@dataclass(slots=True)
class RestoredState:
    """What came out of the shards beside the tensors that are in place already."""

    skeleton: Any
    """Of the home shard; its optimizers stand in `optimizers`."""
    optimizers: dict[str, SavedOptimizer]
    tensors: dict[str, torch.Tensor]
    """Optimizer state and private tensors, in new host memory."""
    placed: frozenset[str]
    """Optimizer state that is divided as its parameter is."""
    by_rank: dict[int, dict[str, Any]]
    """{"progress", "rng"} of every rank that wrote, when ranks or mesh are others; else empty."""
    exact: bool
    """Nothing but the home shard was needed, and it was written by a rank like this one."""
    bytes: int


def restore_tensors(chunks: Chunks, state: LiveState) -> RestoredState:
    """`restore_shards` from one shard; closes it."""
    return restore_shards(OneShard(chunks), state)


def restore_shards(shards: Shards, state: LiveState) -> RestoredState:
    """Copies shards into the live parameters and buffers and into new tensors for the rest.

    Raises ConfigError when the state changed shape since the checkpoint (nothing is written then),
    CorruptCheckpointError when a chunk does not match.
    """
    restore = _Restore(shards, state)
    try:
        return restore.run()
    finally:
        restore.close()


class _Opened:
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
            buffer = self.chunks.buffer()
            self._held[chunk] = self.chunks.read(chunk, buffer), buffer
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
        tensors = {name: self._tensor(name) for name in statetree.tensor_names([*parts.values()])}
        return {part: statetree.decode(value, tensors) for part, value in parts.items()}

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


class _Restore:
    """From headers to a plan, from the plan to bytes in place."""

    def __init__(self, shards: Shards, state: LiveState) -> None:
        self._shards = shards
        self._state = state
        # Not the optimizer's state: it may exist already (Adagrad), and it is replaced as a whole.
        self._live = {**state.parameters(), **state.buffers()}
        self._opened: dict[int, _Opened] = {}
        self._stored = Stored()
        self._mine = threading.local()
        self._buffers: list[Arena] = []

    def run(self) -> RestoredState:
        """All of it."""
        home = self._open(self._shards.home)
        skeleton = home.skeleton()
        same_mesh = skeleton["progress"].get("mesh", "") == self._state.mesh()
        wanted = Wanted(
            self._state, self._live, self._stored, home.header, skeleton, same_mesh=same_mesh
        )
        if not self._shards.regrouped:
            wanted.adopt()
        world_size = self._shards.world_size
        exact = world_size == 1 or self._state.is_alike(world_size)
        as_it_was = same_mesh and not self._shards.regrouped
        # Of other ranks than these one shard may lack state that another one has.
        alone = len(self._shards.within_reach) == 1 or (as_it_was and wanted.suffices)
        if alone:
            moves = wanted.moves(exact=exact)
        else:
            moves = self._from_several(wanted, exact=exact, as_it_was=as_it_was)
        loading = Loading(moves)
        self._read(loading)
        loading.finish()
        return RestoredState(
            skeleton=skeleton, optimizers=wanted.optimizers, tensors=wanted.finish(),
            placed=frozenset(wanted.placed),
            exact=alone and exact and not skeleton.get("partial"),
            by_rank=self._by_rank(same_mesh=same_mesh),
            bytes=sum(o.chunks.index.image_bytes for o in self._opened.values()),
        )  # fmt: skip

    def _from_several(self, wanted: Wanted, *, exact: bool, as_it_was: bool) -> list[Move]:
        """From those in memory if ranks and mesh are what they were, else from all there are."""
        shards = self._shards
        if as_it_was and shards.near:
            self._survey(wanted, shards.near, all_of_them=False)
            with contextlib.suppress(ConfigError):
                return wanted.moves(exact=exact)
        if not shards.complete:
            raise CorruptCheckpointError(
                f"memory: {len(shards.near)} of {shards.count} shards are on this node, and the "
                "generation is not on disk"
            )
        # One rank must know what nobody takes; others, whether several ranks claim one name.
        alone = shards.world_size == 1 or (not as_it_was and wanted.undeclared)
        self._survey(wanted, shards.within_reach, all_of_them=alone)
        if not as_it_was:
            self._require_equal(wanted.ambiguous())
        return wanted.moves(exact=exact)

    def _require_equal(self, parameter_of: Mapping[str, str]) -> None:
        """What several ranks stored as their own must be the same, else nobody knows whose to take.

        `parameter_of`: by name of such a tensor whose state it is, or itself.  Nothing is written
        into the live state.  Raises ConfigError naming the first that differs.
        """
        for name, parameter in parameter_of.items():
            pieces = [piece for piece in self._stored.pieces(name) if not piece.declared]
            if len({(piece.global_shape, piece.dtype) for piece in pieces}) > 1:
                raise _whose(parameter, pieces)
            copies = [torch.empty(piece.shape, dtype=piece.dtype) for piece in pieces]
            part = Holding(global_shape=pieces[0].global_shape, boxes=pieces[0].boxes)
            wants = [Want(name=f"{name} {i}", holding=part, memory=c) for i, c in enumerate(copies)]
            moves = [moves_for(w, [piece]) for w, piece in zip(wants, pieces, strict=True)]
            self._read_alone(Loading(move for some in moves for move in some))
            if not all(_same_bytes(copies[0], copy) for copy in copies[1:]):
                raise _whose(parameter, pieces)

    def _by_rank(self, *, same_mesh: bool) -> dict[int, dict[str, Any]]:
        """What is private to each rank, when none of those that read is what it was."""
        if same_mesh and not self._shards.regrouped:
            return {}
        return {shard: self._open(shard).private() for shard in range(self._shards.count)}

    def _open(self, shard: int) -> _Opened:
        if shard not in self._opened:
            self._opened[shard] = _Opened(self._shards.open(shard))
            if shard not in self._stored:
                self._stored.add(shard, self._opened[shard].header)
        return self._opened[shard]

    def _survey(self, wanted: Wanted, shards: Sequence[int], *, all_of_them: bool) -> None:
        """Learns what shards hold, nearest first, until all that is wanted was seen."""
        blocks = _nearest_first(shards, self._shards.home)
        for block in blocks:
            self._look_into([shard for shard in block if shard not in self._stored])
            wanted.complete(lambda shard: self._open(shard).skeleton())
            if not all_of_them and wanted.covered:
                return
            if len(blocks) > 1:
                for shard in set(self._opened) - {self._shards.home}:
                    self._opened.pop(shard).close()

    def _look_into(self, shards: Sequence[int]) -> None:
        found: dict[int, _Opened] = {}

        def look(number: int) -> None:
            found[number] = _Opened(self._shards.open(shards[number]))

        try:
            run_parallel(range(len(shards)), look, workers=HEADER_READERS)
        finally:
            self._opened |= {shards[number]: opened for number, opened in found.items()}
        for shard in shards:
            self._stored.add(shard, self._opened[shard].header)

    def _read(self, loading: Loading) -> None:
        if self._shards.together is not None:
            self._read_together(self._shards.together, loading)
        else:
            self._read_alone(loading)

    def _jobs(self, loading: Loading) -> tuple[list[tuple[int, int]], int]:
        """(shard, chunk) of all to read once the heads are put, and by how many threads."""
        for shard in loading.shards:
            opened = self._open(shard)
            if opened.head:
                loading.put_head(shard, opened.head)
        jobs = []
        for shard in loading.shards:
            jobs += [(shard, c) for c in loading.chunks(shard, self._opened[shard].chunks.index)]
        return jobs, max((self._opened[s].chunks.workers for s in loading.shards), default=1)

    def _read_alone(self, loading: Loading) -> None:
        jobs, workers = self._jobs(loading)

        def work(number: int) -> None:
            self._put(loading, *jobs[number], self._verified(*jobs[number]))

        run_parallel(range(len(jobs)), work, workers=min(workers, max(1, len(jobs))))

    def _read_together(self, group: ReadTogether, loading: Loading) -> None:
        """With the other ranks of this node; chunks are numbered alike by all."""
        jobs, workers = self._jobs(loading)
        numbers = {
            self._shards.first_chunks[shard] + chunk: (shard, chunk) for shard, chunk in jobs
        }
        group.join(sorted(numbers))

        def work(_: int) -> None:
            group.run(
                lambda number: self._verified(*numbers[number]),
                lambda number, data: self._put(loading, *numbers[number], data),
            )

        run_parallel(range(workers), work, workers=workers)

    def _verified(self, shard: int, chunk: int) -> memoryview:
        """A chunk, from what was read before or from its source."""
        opened = self._opened[shard]
        data = opened.take(chunk)
        if data is None:
            data = opened.chunks.read(chunk, self._buffer(opened.chunks))
        return data

    def _put(self, loading: Loading, shard: int, chunk: int, data: memoryview) -> None:
        start, stop = self._opened[shard].chunks.index.chunk_range(chunk)
        loading.put(shard, start, data[: stop - start])

    def _buffer(self, chunks: Chunks) -> Arena:
        """Memory of this thread, enough for a chunk of any shard so far."""
        size = min(chunks.index.chunk_bytes, chunks.index.image_bytes)
        if getattr(self._mine, "size", 0) < size:
            self._mine.size, self._mine.buffer = size, chunks.buffer()
            self._buffers.append(self._mine.buffer)
        return self._mine.buffer  # type: ignore[no-any-return]

    def close(self) -> None:
        """Lets the buffers go, the shards that were opened here, and those who read with us."""
        if self._shards.together is not None:
            self._shards.together.leave()
        for arena in self._buffers:
            arena.close()
        for opened in self._opened.values():
            opened.close()


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit: 0.0 is not -0.0, and what is no number equals itself."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _whose(parameter: str, pieces: Sequence[Piece]) -> ConfigError:
    shapes = {piece.shard: piece.shape for piece in pieces}
    return ConfigError(
        f"{missing_rule(seen_name(parameter), shapes)}\n"
        "This checkpoint was written without one: resume it on the ranks that wrote it, with "
        "attach(rules=..., axes=...), and save again"
    )


def _nearest_first(shards: Sequence[int], home: int) -> list[Sequence[int]]:
    """Blocks of shards, by distance from the one with the home shard.

    What shares tensors stands together: ranks of a node, stages, copies.  Blocks are the same for
    all ranks, so that those of a node know the same and choose the same pieces.
    """
    blocks = [shards[i : i + KEPT_OPEN] for i in range(0, len(shards), KEPT_OPEN)]
    own = bisect.bisect_right([block[0] for block in blocks], home) - 1
    order = sorted(range(len(blocks)), key=lambda i: (abs(i - own), i))
    return [blocks[i] for i in order]


def parse_skeleton(text: bytes) -> Any:
    """The state's skeleton, as it stands in EXTRA.  Raises CorruptCheckpointError."""
    try:
        skeleton = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"image: its {EXTRA} is malformed: {error!r:.200}") from None
    parts = {"progress", "rng", "optimizers", "modules", "others"}
    if not isinstance(skeleton, dict) or parts - set(skeleton):
        raise CorruptCheckpointError(f"image: its {EXTRA} lacks a part of {sorted(parts)}")
    return skeleton


def apply_state(restored: RestoredState, state: LiveState) -> dict[str, Any]:
    """Puts optimizers, modules' extras and stateful objects back; (progress, rng) for the session.

    Raises ConfigError naming what does not fit any more.
    """
    skeleton, tensors = restored.skeleton, restored.tensors
    for prefix in restored.optimizers:
        _apply_optimizer(state, prefix, state.optimizers[prefix], restored)
    for prefix, module in state.models.items():
        for name, child in module.named_modules():
            path = f"{prefix}.{plain_fqn(name)}._extra_state"
            if path in skeleton["modules"]:
                child.set_extra_state(statetree.decode(skeleton["modules"][path], tensors))
    missing = sorted(set(state.others) - set(skeleton["others"]))
    if missing and not skeleton.get("partial"):
        raise ConfigError(f"{missing[0]}: is not in the checkpoint; it was attached later")
    for name, value in ((n, v) for n, v in state.others.items() if n not in missing):
        value.load_state_dict(statetree.decode(skeleton["others"][name], tensors))
    return {
        "progress": statetree.decode(skeleton["progress"], tensors),
        "rng": statetree.decode(skeleton["rng"], tensors),
    }


def _apply_optimizer(
    state: LiveState, prefix: str, optimizer: torch.optim.Optimizer, restored: RestoredState
) -> None:
    """Writes state and groups directly: `load_state_dict` casts fp32 moments of bf16 weights."""
    saved, tensors = restored.optimizers[prefix], restored.tensors
    named = [
        {state.name_of(parameter): parameter for parameter in group["params"]}
        for group in optimizer.param_groups
    ]
    for number, (group, names) in enumerate(zip(optimizer.param_groups, named, strict=True)):
        its = _saved_group(prefix, saved, tuple(names), number, len(named), exact=restored.exact)
        settings = statetree.decode(its.values, tensors, _device(group["params"]))
        _require_same_settings(prefix, optimizer, set(group) - {"params"}, set(settings))
        group.update(settings)
    live = state_of(optimizer)
    live.clear()
    every = ((name, parameter) for names in named for name, parameter in names.items())
    for name, parameter in ((n, p) for n, p in every if state.has_state(optimizer, p)):
        if name in saved.keys:
            live[parameter] = {
                key: _placed(restored, f"{prefix}.{name}.{key}", parameter, on_device=on_device)
                for key, on_device in saved.keys[name]
            }
        elif name in saved.irregular:
            values = saved.irregular[name]
            own = {n: _divided(restored, n, parameter) for n in statetree.tensor_names(values)}
            live[parameter] = statetree.decode(values, own, parameter.device)
    # A COMMIT of before this existed has none.
    live.update(statetree.decode(saved.loose, tensors))


def _saved_group(
    prefix: str,
    saved: SavedOptimizer,
    names: tuple[str, ...],
    number: int,
    groups: int,
    *,
    exact: bool,
) -> SavedGroup:
    """The settings of a group of parameters: of the same group, or of those that have them now."""
    own = saved.groups[: saved.own_groups]
    if len(own) == groups and own[number].names == names:
        return own[number]
    found = None if exact else saved.group_of(names)
    if found is not None:
        return found
    if len(own) != groups:
        raise ConfigError(
            f"{prefix}: has {groups} parameter groups, the checkpoint {len(own)}; build it with "
            "the same groups"
        )
    raise ConfigError(
        f"{prefix}: its parameter groups differ from the checkpoint's; build it from the same "
        "parameters in the same groups"
    )


def _require_same_settings(
    prefix: str, optimizer: torch.optim.Optimizer, now: set[str], saved: set[str]
) -> None:
    """Another version may add settings and a scheduler drop some; both at once is another kind."""
    if saved - now and now - saved:
        raise ConfigError(
            f"{prefix}: a {type(optimizer).__qualname__} with {', '.join(sorted(now - saved))} "
            f"cannot go on from the checkpoint, whose optimizer has "
            f"{', '.join(sorted(saved - now))}; use --fresh to start over, or the code that wrote "
            "it"
        )


def _placed(
    restored: RestoredState, name: str, parameter: torch.Tensor, *, on_device: bool
) -> torch.Tensor:
    if name not in restored.tensors:
        raise CorruptCheckpointError(f"{name}: is named in the state and not in the image")
    tensor = restored.tensors[name]
    return _divided(restored, name, parameter, tensor.to(parameter.device) if on_device else tensor)


def _divided(
    restored: RestoredState, name: str, parameter: torch.Tensor, tensor: torch.Tensor | None = None
) -> torch.Tensor:
    """State in the form of a DTensor parameter is a DTensor as well."""
    tensor = restored.tensors[name] if tensor is None else tensor
    if name not in restored.placed or not hasattr(parameter, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor.to(parameter.device), parameter.device_mesh,
        parameter.placements,  # type: ignore[attr-defined]  # a DTensor
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def _device(parameters: list[torch.Tensor]) -> torch.device | None:
    return parameters[0].device if parameters else None
