"""Slot or shard file -> live state: every chunk verified while it is copied into place.

Restored tensors live in private memory, never in a slot or a mapped file.  The header says where
everything stands; what the live state expects and what the image holds must agree before a byte is
written.
"""

import json
import os
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autockpt.executors import statetree
from autockpt.executors.catalogue import ChunkSource, load_index, shard_path
from autockpt.executors.directory import read_commit
from autockpt.executors.dtypes import true_form
from autockpt.executors.image import ImageIndex, find_header
from autockpt.executors.layout.plan import EXTRA
from autockpt.executors.memory import Arena
from autockpt.executors.persist import run_parallel
from autockpt.executors.sharding.loading import Loading
from autockpt.executors.sharding.names import plain_fqn
from autockpt.executors.sharding.optimizers import state_of
from autockpt.executors.sharding.pieces import Stored
from autockpt.executors.sharding.saved import SavedGroup, SavedOptimizer
from autockpt.executors.sharding.wanted import Wanted
from autockpt.executors.state import LiveState
from autockpt.values.errors import ConfigError, CorruptCheckpointError

COPIERS = 2
"""Threads that copy from memory: two saturate it where one does not."""


class Chunks(Protocol):
    """Verified chunks of one image, from memory or storage."""

    index: ImageIndex
    workers: int
    """Threads that should read at the same time."""

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


class Shards(Protocol):
    """The shards of one generation, as far as this rank can reach them."""

    home: int
    """The shard whose private state (random state, loader, objects) this rank takes."""
    count: int
    world_size: int
    """Ranks that restore."""

    def open(self, shard: int) -> Chunks:
        """One of them; the caller closes it.  Raises CorruptCheckpointError, StorageError."""


class OneShard:
    """The shard that this rank wrote itself; where others have more, it must do without them."""

    home, world_size = 0, 1

    def __init__(self, chunks: Chunks, count: int = 1) -> None:
        """`count`: shards of the generation, this one among them."""
        self._chunks = chunks
        self.count = count

    def open(self, shard: int) -> Chunks:
        """Its own.  Raises ConfigError for others."""
        if shard != self.home:
            raise ConfigError("this rank needs more than the shard of its own that is held here")
        return self._chunks


class DiskShards:
    """The shard files of a commit, for one of `world_size` ranks; each is opened when needed."""

    def __init__(self, folder: str, rank: int, world_size: int, root: str = "") -> None:
        """`root`: what this rank's own shard must be; "" if nobody says.

        Raises CorruptCheckpointError or StorageError.
        """
        self._folder = folder
        self._commit = read_commit(os.path.join(folder, "COMMIT"))
        self.count = len(self._commit.records)
        self.world_size = world_size
        # More ranks than before: what is private to a rank comes from the first one.
        self.home = rank if rank < self.count else 0
        if root not in ("", self._commit.records[self.home].get("root")):
            raise CorruptCheckpointError(f"{folder}: COMMIT names another shard of rank {rank}")

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
    """The home shard was all that is needed and nothing else: its rank was one like this."""
    bytes: int


def restore_tensors(chunks: Chunks, state: LiveState) -> RestoredState:
    """`restore_shards` from one shard, which the caller closes."""
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
        self.header = find_header(self.held, chunks.index.image_bytes)

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
        size = self.chunks.index.chunk_bytes
        text = b"".join(
            bytes(self.held(chunk)[max(0, place.start - chunk * size) : place.stop - chunk * size])
            for chunk in range(place.start // size, -(-place.stop // size))
        )
        return parse_skeleton(text)

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
        alone = self._shards.count == 1 or wanted.suffices
        if not alone:
            for shard in range(self._shards.count):
                self._open(shard)
            wanted.complete(lambda shard: self._open(shard).skeleton())
        world_size = self._shards.world_size
        exact = world_size == 1 or self._state.is_alike(world_size)
        loading = Loading(wanted.moves(exact=exact))
        self._read(loading)
        loading.finish()
        return RestoredState(
            skeleton=skeleton, optimizers=wanted.optimizers, tensors=wanted.finish(),
            placed=frozenset(wanted.placed), exact=alone and exact,
            bytes=sum(o.chunks.index.image_bytes for o in self._opened.values()),
        )  # fmt: skip

    def _open(self, shard: int) -> _Opened:
        if shard not in self._opened:
            opened = _Opened(self._shards.open(shard))
            self._opened[shard] = opened
            self._stored.add(shard, opened.header)
        return self._opened[shard]

    def _read(self, loading: Loading) -> None:
        jobs = []
        for shard in loading.shards:
            jobs += [(shard, c) for c in loading.chunks(shard, self._opened[shard].chunks.index)]

        def work(number: int) -> None:
            shard, chunk = jobs[number]
            opened = self._opened[shard]
            start, _ = opened.chunks.index.chunk_range(chunk)
            data = opened.take(chunk)
            if data is None:
                data = opened.chunks.read(chunk, self._buffer(opened.chunks))
            loading.put(shard, start, data)

        workers = max((self._opened[shard].chunks.workers for shard in loading.shards), default=1)
        run_parallel(range(len(jobs)), work, workers=min(workers, max(1, len(jobs))))

    def _buffer(self, chunks: Chunks) -> Arena:
        """Memory of this thread."""
        key = f"{type(chunks).__name__}{chunks.index.chunk_bytes}"
        if not hasattr(self._mine, key):
            setattr(self._mine, key, chunks.buffer())
            self._buffers.append(getattr(self._mine, key))
        return getattr(self._mine, key)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Lets the buffers go, and the shards that were opened here."""
        for arena in self._buffers:
            arena.close()
        for opened in self._opened.values():
            opened.close()
            if not isinstance(self._shards, OneShard):
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
    for prefix, optimizer in state.optimizers.items():
        _apply_optimizer(state, prefix, optimizer, restored)
    for prefix, module in state.models.items():
        for name, child in module.named_modules():
            path = f"{prefix}.{plain_fqn(name)}._extra_state"
            if path in skeleton["modules"]:
                child.set_extra_state(statetree.decode(skeleton["modules"][path], tensors))
    missing = sorted(set(state.others) - set(skeleton["others"]))
    if missing:
        raise ConfigError(f"{missing[0]}: is not in the checkpoint; it was attached later")
    for name, value in state.others.items():
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
