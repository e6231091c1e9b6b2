"""Slot or shard file -> live state: every chunk verified while it is copied into place.

Restored tensors live in private memory, never in a slot or a mapped file.  The header says where
everything stands; what the live state expects and what the image holds must agree before a byte is
written.
"""

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
from autockpt.executors.sharding.loading import Loading
from autockpt.executors.sharding.pieces import Stored
from autockpt.executors.sharding.saved import SavedGroup, SavedOptimizer
from autockpt.executors.sharding.together import ReadTogether
from autockpt.executors.sharding.wanted import Wanted
from autockpt.executors.state import LiveState, plain_name
from autockpt.values.errors import ConfigError, CorruptCheckpointError, StorageError

COPIERS = 2
"""Threads that copy from memory: two saturate it where one does not."""


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
    def within_reach(self) -> Sequence[int]:
        """All that can be opened, ascending."""

    @property
    def every_tensor(self) -> bool:
        """This rank is alone: it must take whatever the shards hold."""

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

    together: ReadTogether | None = None
    first_chunks: Sequence[int] = ()


class OneShard(_Alone):
    """A rank that needs nothing but what one shard holds."""

    home, every_tensor = 0, True
    within_reach: Sequence[int] = (0,)

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def open(self, shard: int) -> Chunks:
        """The only one."""
        return self._chunks


class NodeShards(_Alone):
    """The slots of a node that hold one generation: this rank's own, and its neighbours'."""

    every_tensor = False

    def __init__(
        self, rank: int, own: SlotChunks, neighbours: Mapping[int, tuple[Arena, int]]
    ) -> None:
        """`neighbours`: (slot, capacity of its image) by rank; the caller closes them."""
        self.home = rank
        self._own, self._neighbours = own, neighbours
        self.within_reach: Sequence[int] = sorted({rank, *neighbours})

    def open(self, shard: int) -> Chunks:
        """One of them.  Raises CorruptCheckpointError when it holds something else."""
        if shard == self.home:
            return self._own
        arena, capacity = self._neighbours[shard]
        index, own = read_trailer(arena.view[capacity:]), self._own.index
        if index is None or (index.run_id, index.generation) != (own.run_id, own.generation):
            raise CorruptCheckpointError(
                f"memory: rank {shard} does not hold {own.generation} any more"
            )
        return SlotChunks(arena, index)


class DiskShards:
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
        self.within_reach: Sequence[int] = range(len(self._commit.records))
        self.every_tensor = world_size == 1
        # More ranks than before: what is private to a rank comes from the first one.
        self.home = rank if rank in self.within_reach else 0
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
        return ChunkSource(
            shard_path(self._folder, record), load_index(self._folder, record, self._commit)
        )


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

    def _bytes(self, start: int, stop: int) -> bytes:
        if stop <= len(self.head):
            return bytes(self.head[start:stop])
        size = self.chunks.index.chunk_bytes
        return b"".join(
            bytes(self.held(chunk)[max(0, start - chunk * size) : stop - chunk * size])
            for chunk in range(start // size, -(-stop // size))
        )

    def close(self) -> None:
        """Lets its buffers go."""
        for _, buffer in self._held.values():
            buffer.close()


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
        wanted = Wanted(self._state, self._live, self._stored, home.header, skeleton)
        alone = len(self._shards.within_reach) == 1 or wanted.suffices
        if not alone:
            for shard in self._shards.within_reach:
                self._open(shard)
            wanted.complete(lambda shard: self._open(shard).skeleton())
        loading = Loading(wanted.moves(exact=alone or self._shards.every_tensor))
        self._read(loading)
        loading.finish()
        return RestoredState(
            skeleton=skeleton, optimizers=wanted.optimizers, tensors=wanted.finish(),
            placed=frozenset(wanted.placed), exact=alone and not skeleton.get("partial"),
            bytes=sum(o.chunks.index.image_bytes for o in self._opened.values()),
        )  # fmt: skip

    def _open(self, shard: int) -> _Opened:
        if shard not in self._opened:
            opened = _Opened(self._shards.open(shard))
            self._opened[shard] = opened
            self._stored.add(shard, opened.header)
        return self._opened[shard]

    def _read(self, loading: Loading) -> None:
        for shard, opened in self._opened.items():
            if opened.head:
                loading.put_head(shard, opened.head)
        jobs = []
        for shard in loading.shards:
            jobs += [(shard, c) for c in loading.chunks(shard, self._opened[shard].chunks.index)]
        workers = max((self._opened[shard].chunks.workers for shard in loading.shards), default=1)
        if self._shards.together is not None:
            self._read_together(self._shards.together, loading, jobs, workers)
            return

        def work(number: int) -> None:
            self._put(loading, *jobs[number], self._verified(*jobs[number]))

        run_parallel(range(len(jobs)), work, workers=min(workers, max(1, len(jobs))))

    def _read_together(
        self, group: ReadTogether, loading: Loading, jobs: list[tuple[int, int]], workers: int
    ) -> None:
        """With the other ranks of this node; chunks are numbered alike by all."""
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
        """Memory of this thread."""
        key = f"{type(chunks).__name__}{chunks.index.chunk_bytes}"
        if not hasattr(self._mine, key):
            setattr(self._mine, key, chunks.buffer())
            self._buffers.append(getattr(self._mine, key))
        return getattr(self._mine, key)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Lets the buffers go, the shards that were opened here, and those who read with us."""
        if self._shards.together is not None:
            self._shards.together.leave()
        for arena in self._buffers:
            arena.close()
        for opened in self._opened.values():
            opened.close()
            opened.chunks.close()


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
            path = f"{prefix}.{plain_name(name)}._extra_state"
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
    optimizer.state.clear()
    for name, parameter in ((n, p) for names in named for n, p in names.items()):
        if name in saved.keys:
            optimizer.state[parameter] = {
                key: _placed(restored, f"{prefix}.{name}.{key}", parameter, on_device=on_device)
                for key, on_device in saved.keys[name]
            }
        elif name in saved.irregular:
            values = saved.irregular[name]
            own = {n: _divided(restored, n, parameter) for n in statetree.tensor_names(values)}
            optimizer.state[parameter] = statetree.decode(values, own, parameter.device)
    # A COMMIT of before this existed has none.
    optimizer.state.update(statetree.decode(saved.loose, tensors))


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
