"""Slot or shard file -> live state: every chunk verified while it is copied into place.

Restored tensors live in private memory, never in a slot or a mapped file.  The header says where
everything stands; what the live state expects and what the image holds must agree before a byte is
written.
"""

import json
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autockpt.executors import statetree
from autockpt.executors.catalogue import ChunkSource, load_index, shard_path
from autockpt.executors.directory import read_commit
from autockpt.executors.image import ImageHeader, ImageIndex, find_header
from autockpt.executors.layout.plan import EXTRA
from autockpt.executors.memory import Arena
from autockpt.executors.persist import run_parallel
from autockpt.executors.scatter import Scatter
from autockpt.executors.state import LiveState, plain_name
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


@dataclass(slots=True)
class RestoredState:
    """What came out of an image beside the tensors that are in place already."""

    skeleton: Any
    tensors: dict[str, torch.Tensor]
    """Optimizer state and boundary tensors, in new host memory."""
    bytes: int


def restore_tensors(chunks: Chunks, state: LiveState) -> RestoredState:
    """Copies an image into the live parameters and buffers and into new tensors for the rest.

    Raises ConfigError when the state changed shape since the checkpoint (nothing is written then),
    CorruptCheckpointError when a chunk does not match.
    """
    restore = _Restore(chunks, state)
    count = len(chunks.index.digests)
    try:
        run_parallel(range(count), restore.copy, workers=min(chunks.workers, count))
    finally:
        restore.close()
    fresh = restore.scatter().finish()
    return RestoredState(skeleton=_skeleton(fresh), tensors=fresh, bytes=chunks.index.image_bytes)


class _Restore:
    """One image on its way: readers run ahead while the first chunk, the header, is looked into."""

    def __init__(self, chunks: Chunks, state: LiveState) -> None:
        self._chunks = chunks
        # Not the optimizer's state: it may exist already (Adagrad), and it is replaced as a whole.
        self._live = {**state.parameters(), **state.buffers()}
        self._scatter: Scatter | None = None
        self._looked = threading.Event()
        """The header was read, or refused."""
        self._mine = threading.local()
        self._buffers: list[Arena] = []

    def copy(self, chunk: int) -> None:
        """Verifies a chunk and copies it into place; chunk 0 is handed out before all others."""
        start, _ = self._chunks.index.chunk_range(chunk)
        try:
            data = self._chunks.read(chunk, self._buffer())
            if chunk == 0:
                self._scatter = Scatter(_header(self._chunks, data), self._live)
        finally:
            if chunk == 0:
                self._looked.set()
        self._looked.wait()
        if self._scatter is not None:  # else chunk 0 has failed and says why
            self._scatter.put(start, data)

    def _buffer(self) -> Arena:
        """Memory of this thread."""
        if not hasattr(self._mine, "arena"):
            self._mine.arena = self._chunks.buffer()
            self._buffers.append(self._mine.arena)
        return self._mine.arena  # type: ignore[no-any-return]

    def scatter(self) -> Scatter:
        """After the last chunk."""
        assert self._scatter is not None
        return self._scatter

    def close(self) -> None:
        """Lets the buffers go."""
        for arena in self._buffers:
            arena.close()


def _header(chunks: Chunks, first: memoryview) -> ImageHeader:
    """The header; chunks behind the first are read into a buffer of their own."""
    buffer = chunks.buffer()
    try:
        return find_header(
            lambda n: chunks.read(n, buffer) if n else first, chunks.index.image_bytes
        )
    finally:
        buffer.close()


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


def _skeleton(fresh: dict[str, torch.Tensor]) -> Any:
    """Taken out of the tensors."""
    if EXTRA not in fresh:
        raise CorruptCheckpointError(f"image: its {EXTRA} is missing")
    return parse_skeleton(bytes(fresh.pop(EXTRA).view(torch.uint8).numpy()))


def apply_state(restored: RestoredState, state: LiveState) -> dict[str, Any]:
    """Puts optimizers, modules' extras and stateful objects back; (progress, rng) for the session.

    Raises ConfigError naming what does not fit any more.
    """
    skeleton, tensors = restored.skeleton, restored.tensors
    for prefix, optimizer in state.optimizers.items():
        if prefix not in skeleton["optimizers"]:
            raise ConfigError(f"{prefix}: is not in the checkpoint; attach what wrote it")
        _apply_optimizer(state, prefix, optimizer, skeleton["optimizers"][prefix], tensors)
    for prefix, module in state.models.items():
        for name, child in module.named_modules():
            path = f"{prefix}.{plain_name(name)}._extra_state"
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
    state: LiveState,
    prefix: str,
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Writes state and groups directly: `load_state_dict` casts fp32 moments of bf16 weights."""
    by_place: list[list[tuple[str, torch.Tensor]]] = []
    if len(optimizer.param_groups) != len(saved["groups"]):
        raise ConfigError(
            f"{prefix}: has {len(optimizer.param_groups)} parameter groups, the checkpoint "
            f"{len(saved['groups'])}; build it with the same groups"
        )
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        names = [state.name_of(parameter) for parameter in group["params"]]
        if "\n".join(names) != values["params"]:
            raise ConfigError(
                f"{prefix}: its parameter groups differ from the checkpoint's; build it from the "
                "same parameters in the same groups"
            )
        by_place.append(list(zip(names, group["params"], strict=True)))
        settings = statetree.decode(values["values"], tensors, _device(group["params"]))
        _require_same_settings(prefix, optimizer, set(group) - {"params"}, set(settings))
        group.update(settings)
    optimizer.state.clear()
    for keys, places in saved["regular"].items():
        marks = [mark.rsplit(":", 1) for mark in keys.split(" ")]
        for g, i in places:
            name, parameter = by_place[g][i]
            optimizer.state[parameter] = {
                key: _placed(tensors, f"{prefix}.{name}.{key}", parameter, on_device=mark == "d")
                for key, mark in marks
            }
    flat = {name: parameter for group in by_place for name, parameter in group}
    for name, values in saved["irregular"].items():
        parameter = flat[name]
        optimizer.state[parameter] = statetree.decode(values, tensors, parameter.device)
    # A COMMIT of before this existed has none.
    optimizer.state.update(statetree.decode(saved.get("loose", {}), tensors))


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
    tensors: dict[str, torch.Tensor], name: str, parameter: torch.Tensor, *, on_device: bool
) -> torch.Tensor:
    if name not in tensors:
        raise CorruptCheckpointError(f"{name}: is named in the state and not in the image")
    return tensors[name].to(parameter.device) if on_device else tensors[name]


def _device(parameters: list[torch.Tensor]) -> torch.device | None:
    return parameters[0].device if parameters else None
