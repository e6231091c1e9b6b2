"""The movers of executors/ in the shape that probes time: nothing here moves a byte itself."""

import ctypes
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch

from autockpt.executors.image.codecs import codec
from autockpt.executors.image.container import chunk_digest
from autockpt.executors.image.layout.plan import EXTRA, Layout, TensorSpec, element_kind
from autockpt.executors.image.layout.runs import Run
from autockpt.executors.keeper.saving.encoded_file import FRAME_SLACK, FrameBuffer
from autockpt.executors.linux.memory import Arena, headroom, require_headroom
from autockpt.executors.linux.timeslice import ask_for_long_slices
from autockpt.executors.snapshot.copy_engine import CopyJob, ProgressCounter, run_jobs
from autockpt.executors.snapshot.device import DeviceCopier, register_with_cuda
from autockpt.executors.snapshot.replica_shares import Place
from autockpt.executors.snapshot.snapshotter import Snapshot, Snapshotter
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.tensor_index import local_part
from autockpt.executors.storage.places.images import write_stored
from autockpt.executors.storage.shard_file import write_image
from autockpt.executors.throttle.idle_windows import IdleWindowThrottle
from autockpt.profiles.probes.codecs import Codec, Piece
from autockpt.profiles.probes.links import Move
from autockpt.profiles.probes.proof import raw_bytes
from autockpt.profiles.samples import TensorFacts
from autockpt.profiling.facts.ranks import Ranks
from autockpt.values.errors import AutockptError
from autockpt.values.plan import CHUNK_BYTES, WRITERS
from autockpt.values.policy_keys.paths import is_store_url

T = TypeVar("T")
TensorClass = Literal["parameters", "moments", "other"]

CODECS = ("planes",)
"""Codecs that are offered to the policy."""
LINK_BYTES = 64 * 2**20
"""Least memory for link samples, however small the state: more than caches hold."""
LINK_LIMIT_BYTES = 256 * 2**20
_COUNTER_BYTES = 4096


class LiveSnapshot:
    """Snapshots of a live state into one arena, by the Snapshotter that runs will use."""

    def __init__(self, state: LiveState, progress: Callable[[], dict[str, Any]]) -> None:
        self.state, self._progress = state, progress
        self.changed: set[str] = set()
        """Tensors that changed behind the fence."""
        self._counter = Arena.anonymous(_COUNTER_BYTES)
        self._snapshotter = Snapshotter(state, self._counter.view, place=Ranks.find().place)
        self.layout: Layout = self._snapshotter.plan(progress())
        self.arena: Arena | None = None
        self._began_s = 0.0

    def allocate(self) -> None:
        """Faults the memory of one image.  Raises GuardError when it is not there."""
        require_headroom(self.layout.image_bytes, what="profile: a snapshot of the state")
        self.arena = Arena.anonymous(self.layout.image_bytes)
        register_with_cuda(self.arena)

    @property
    def image(self) -> memoryview:
        """The bytes of the last snapshot."""
        assert self.arena is not None
        return self.arena.view[: self.layout.image_bytes]

    def blocking(self) -> float:
        """A whole snapshot inside the boundary; seconds."""
        assert self.arena is not None
        began = time.monotonic()
        self._take(lazy=False)
        self._snapshotter.fence()
        return time.monotonic() - began

    def begin(self, gate: IdleWindowThrottle | None = None) -> float:
        """At the boundary: copies what must be copied now, starts the rest; seconds blocked."""
        snapshot = self._take(lazy=True, gate=gate)
        self._began_s = snapshot.began_s
        return snapshot.boundary_stall_s

    @property
    def device(self) -> DeviceCopier | None:
        """The device that copies the state; None: the copy thread does."""
        return self._snapshotter.copier

    def _take(self, *, lazy: bool, gate: IdleWindowThrottle | None = None) -> Snapshot:
        assert self.arena is not None
        self._snapshotter.gate = gate
        return self._snapshotter.begin(
            self.arena,
            self._progress(),
            lazy=lazy,
            capacity=self.arena.nbytes,
            began=lambda layout: None,
        )

    def fence(self) -> float:
        """Before the optimizer step: waits for the rest and checks it; seconds blocked."""
        snapshot = self._snapshotter.current
        changed = {name for name in self._snapshotter.fence() if not name.startswith("(")}
        if snapshot is not None and snapshot.error is not None:
            raise AutockptError(f"copy into the slot failed: {snapshot.error!r}")
        self.changed |= changed
        self.state.not_lazy |= changed
        self.layout = self._snapshotter.layout or self.layout
        return snapshot.fence_stall_s if snapshot is not None else 0.0

    def wait_copied(self) -> float:
        """From any thread: waits for the last byte; seconds since the boundary."""
        engine = self._snapshotter.engine
        engine.wait()
        ended_s = engine.ended_s if engine.ended_s > self._began_s else time.monotonic()
        return ended_s - self._began_s

    def close(self) -> None:
        """Ends the copy thread; the memory goes with the process."""
        self._snapshotter.close()

    def regions(self) -> list[Piece]:
        """The tensors of the last snapshot, by class."""
        assert self.arena is not None
        owned = self.state.tensors.keys()
        return [
            Piece(
                _class(entry.spec, owned),
                self.arena.view[entry.offset : entry.end],
                entry.spec.dtype,
                role=entry.spec.name.rpartition(".")[2],
            )
            for entry in self.layout.entries
            if entry.spec.nbytes and not entry.spec.name.startswith("__")
        ]


class InWindows:
    """The same snapshots, held back by a gate."""

    def __init__(
        self, snapshot: LiveSnapshot, gate: Callable[[], IdleWindowThrottle | None]
    ) -> None:
        self._snapshot, self._gate = snapshot, gate

    def begin(self) -> float:
        """At the boundary; seconds blocked."""
        return self._snapshot.begin(self._gate())

    def fence(self) -> float:
        """Before the optimizer step: what windows did not take passes now; seconds blocked."""
        return self._snapshot.fence()

    def wait_copied(self) -> float:
        """Seconds from the boundary to the last byte."""
        return self._snapshot.wait_copied()


class AtBoundary:
    """The same snapshots, whole inside the boundary."""

    def __init__(self, snapshot: LiveSnapshot) -> None:
        self._snapshot = snapshot
        self._took_s = 0.0

    def begin(self) -> float:
        """All of it; seconds blocked."""
        self._took_s = self._snapshot.blocking()
        return self._took_s

    def fence(self) -> float:
        """Nothing is left."""
        return 0.0

    def wait_copied(self) -> float:
        """Seconds from the boundary to the last byte."""
        return self._took_s


def tensor_facts(
    state: LiveState, layout: Layout, changed: set[str], place: Place | None = None
) -> list[TensorFacts]:
    """Every tensor that a checkpoint of this rank holds; `changed` ones are not lazy.

    `place`: of this rank, for which other nodes hold the same; None: not asked.
    """
    specs = [entry.spec for entry in layout.entries if entry.spec.name != EXTRA]
    owned = state.tensors.keys()
    replicas = _replicas(state, place)
    return [
        TensorFacts(
            name=spec.name,
            tensor_class=_class(spec, owned),
            dtype=spec.true_dtype,
            bytes=spec.nbytes,
            lazy=spec.lazy and spec.name not in changed | state.not_lazy,
            elsewhere=replicas.get(spec.name, ()),
        )
        for spec in specs
    ]


def _replicas(state: LiveState, place: Place | None) -> dict[str, tuple[int, ...]]:
    """By tensor the other nodes that hold it as well.

    Empty where a part of the state is known to have no replica: shards are then not alike.
    """
    inventory = state.inventory()
    if place is None or any(name not in inventory.holdings for name in inventory.lazy):
        return {}
    return {n: place.further_nodes(h.holders) for n, h in inventory.holdings.items()}


def restored_bytes(state: LiveState, layout: Layout, place: Place) -> int:
    """Bytes that a restore puts in place for a rank; ranks of a node divide their common tensors.

    0 where a rank restores what it stores.
    """
    if place.among == "node":
        return 0
    near, inventory = replace(place, among="node"), state.inventory()
    own = sum(entry.spec.nbytes for entry in layout.entries if not entry.spec.lazy)
    for name, tensor in inventory.locals.items():
        holders = inventory.holdings[name].holders if name in inventory.holdings else ()
        own += tensor.nbytes // max(1, len(near.members(holders)))
    return own


def proof_tensors(state: LiveState) -> dict[str, torch.Tensor]:
    """The local bytes of everything that might be copied lazily, and of the buffers."""
    inventory = state.inventory()
    buffers = {name: local_part(tensor) for name, tensor in inventory.buffers.items()}
    return {**inventory.locals, **buffers}


def host_copy(source: memoryview, target: Arena) -> Move:
    """The copy loop of a snapshot, from one faulted memory to another of the same length.

    It walks through both, so that small sizes are not copied within a cache, as they would not be
    after an iteration of training.
    """
    counter = ProgressCounter(memoryview(bytearray(16)))
    address = ctypes.addressof(ctypes.c_char.from_buffer(source))
    next_start = 0

    def move(nbytes: int) -> None:
        nonlocal next_start
        start = next_start if next_start + nbytes <= len(source) else 0
        run_jobs([CopyJob(nbytes, target.address + start, address + start, nbytes)], counter)
        next_start = start + nbytes

    return move


def persist(path: str, image: memoryview) -> None:
    """Persist an image as a keeper does with the default staging: digests, then a durable write."""
    for start in range(0, len(image), CHUNK_BYTES):
        chunk_digest(image[start : start + CHUNK_BYTES])
    write(path, image)


def write(path: str, image: memoryview) -> None:
    """A durable write with the default staging."""
    if is_store_url(path):
        write_stored(path, image)
        return
    write_image(path, image, writers=WRITERS, chunk_bytes=CHUNK_BYTES, direct=True)


class ElementCodec:
    """A codec of runs, for pieces of one dtype; for one thread, as it keeps a writer's memory."""

    def __init__(self, name: str) -> None:
        self._codec = codec(name)
        self._frames = FrameBuffer()

    def encode(self, raw: memoryview, dtype: str, base: memoryview | None, /) -> memoryview | bytes:
        """The frame of a piece, until the next call."""
        kind = element_kind(dtype, delta=base is not None)
        whole = len(raw) - len(raw) % kind.width
        runs = [Run(whole, kind), Run(len(raw) - whole)]
        into = self._frames.room(len(raw) + FRAME_SLACK)
        return self._codec.encode(raw, runs=runs, base=base, into=into)

    def decode(
        self, frame: memoryview | bytes, raw_bytes: int, base: memoryview | None, /
    ) -> memoryview | bytes:
        """The piece of a frame."""
        return self._codec.decode(frame, raw_bytes, base=base)


def codecs() -> dict[str, Codec]:
    """The codecs that need no base, by name."""
    return {name: ElementCodec(name) for name in CODECS}


def base_codecs() -> dict[str, Codec]:
    """Return the codecs that store differences."""
    return {"delta": ElementCodec("planes")}


def giving_way(work: Callable[[], T]) -> Callable[[], T]:
    """The same, for a thread of its own, which gives way to the training as a keeper's do."""

    def given_way() -> T:
        ask_for_long_slices()
        return work()

    return given_way


def encoders(pieces: Sequence[Piece]) -> list[Callable[[], int]]:
    """One for each writer of a save: encodes the next of the pieces and says how long it was."""

    def encoder(first: int) -> Callable[[], int]:
        mine = ElementCodec(CODECS[0])
        turns = itertools.cycle([*pieces[first:], *pieces[:first]])

        def encode() -> int:
            piece = next(turns)
            mine.encode(piece.data, piece.dtype, None)
            return len(piece.data)

        return encode

    return [encoder(i * len(pieces) // WRITERS) for i in range(WRITERS)]


def filled_memory(state: LiveState, nbytes: int) -> Arena:
    """Faulted memory with the first bytes of the state, when the whole does not fit."""
    arena = Arena.anonymous(nbytes)
    done = 0
    for tensor in proof_tensors(state).values():
        data = raw_bytes(tensor)
        count = min(len(data), arena.nbytes - done)
        arena.view[done : done + count] = data[:count]
        done += count
        if done == arena.nbytes:
            break
    return arena


def spare_bytes() -> int:
    """Return the memory for a probe beside the snapshot: an eighth of the available bytes."""
    return max(2**20, headroom().available_bytes // 8)


def _class(spec: TensorSpec, owned: Collection[str]) -> TensorClass:
    """Random state and loader positions are no moments, however many numbers they have."""
    if spec.name in owned and spec.tensor_class == "parameters":
        return "parameters"
    return "moments" if spec.name in owned and spec.tensor_class == "moments" else "other"
