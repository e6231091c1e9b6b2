"""Slot or shard file -> live state: every chunk verified while it is copied into place.

Restored tensors live in private memory, never in a slot or a mapped file.  The header says where
everything stands; what the live state expects and what the image holds must agree before a byte is
written.
"""

import bisect
import ctypes
import json
import math
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autockpt.executors import statetree
from autockpt.executors.catalogue import ChunkSource, load_index, shard_path
from autockpt.executors.directory import read_commit
from autockpt.executors.dtypes import true_dtype
from autockpt.executors.image import ImageHeader, ImageIndex, header_bytes, read_header
from autockpt.executors.layout import EXTRA, NATURAL_DTYPE
from autockpt.executors.memory import Arena
from autockpt.executors.persist import run_parallel
from autockpt.executors.state import LiveState, local_part, plain_name
from autockpt.values.errors import ConfigError, CorruptCheckpointError

READERS = 2


class Chunks(Protocol):
    """Verified chunks of one image, from memory or storage."""

    index: ImageIndex

    def read(self, chunk: int, buffer: Arena) -> memoryview:
        """The raw bytes of a chunk.  Raises CorruptCheckpointError when they do not match."""

    def buffer(self) -> Arena:
        """Memory that `read` may use; one per thread."""

    def close(self) -> None:
        """Lets go."""


class SlotChunks:
    """The image in a slot, checked against its trailer's digests."""

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
    index = chunks.index
    header = _header(chunks)
    # Not the optimizer's state: it may exist already (Adagrad), and it is replaced as a whole.
    live = {**state.parameters(), **state.buffers()}
    places, fresh = _destinations(header, live)
    scatter = _Scatter(places)
    buffers = threading.local()
    made: list[Arena] = []

    def copy(chunk: int) -> None:
        if not hasattr(buffers, "arena"):
            buffers.arena = chunks.buffer()
            made.append(buffers.arena)
        start, _ = index.chunk_range(chunk)
        scatter.put(start, chunks.read(chunk, buffers.arena))

    try:
        run_parallel(range(len(index.digests)), copy, workers=READERS)
    finally:
        for arena in made:
            arena.close()
    scatter.finish()
    _resolve_aliases(header, live, fresh)
    return RestoredState(skeleton=_skeleton(fresh), tensors=fresh, bytes=index.image_bytes)


def _skeleton(fresh: dict[str, torch.Tensor]) -> Any:
    """The state's skeleton, taken out of the tensors.  Raises CorruptCheckpointError."""
    try:
        skeleton = json.loads(bytes(fresh.pop(EXTRA).view(torch.uint8).numpy()))
    except (KeyError, ValueError, RecursionError) as error:
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


def _header(chunks: Chunks) -> ImageHeader:
    """The header, which may span several chunks."""
    buffer = chunks.buffer()
    try:
        first = chunks.read(0, buffer)
        needed = header_bytes(first, chunks.index.image_bytes)
        data = bytearray(first[:needed])
        chunk = 1
        while len(data) < needed:
            data += chunks.read(chunk, buffer)[: needed - len(data)]
            chunk += 1
        return read_header(bytes(data), chunks.index.image_bytes)
    finally:
        buffer.close()


@dataclass(slots=True)
class _Place:
    start: int
    stop: int
    staging: torch.Tensor
    """Contiguous host bytes that receive the data."""
    target: torch.Tensor | None
    """Live tensor to copy the staging into at the end, None when it is the staging."""


def _destinations(
    header: ImageHeader, live: dict[str, torch.Tensor]
) -> tuple[list[_Place], dict[str, torch.Tensor]]:
    """Where every tensor of the image goes; those without a live tensor go to new memory."""
    _require_same_names(header, live)
    places: list[_Place] = []
    fresh: dict[str, torch.Tensor] = {}
    for name, place in header.tensors.items():
        dtype = true_dtype(header.true_dtypes.get(name, NATURAL_DTYPE[place.dtype]))
        shape = place.shape
        if header.true_dtypes.get(name) in ("complex128", "complex32"):
            shape = shape[:-1]
        # A header may lie: bytes are copied by the image's lengths into memory of this size.
        if dtype.itemsize * math.prod(shape) != place.stop - place.start:
            raise CorruptCheckpointError(
                f"{name}: {place.stop - place.start} bytes cannot be {tuple(shape)} {dtype}"
            )
        tensor = live.get(name)
        target = None
        if tensor is None:
            staging = fresh[name] = torch.empty(shape, dtype=dtype)
        else:
            local = local_part(tensor.detach())
            _require_same_form(name, local, dtype, shape)
            if local.device.type == "cpu" and local.is_contiguous():
                staging = local
            else:
                staging, target = torch.empty(shape, dtype=dtype), local
        if place.stop > place.start:
            places.append(_Place(place.start, place.stop, staging, target))
    return places, fresh


def _resolve_aliases(
    header: ImageHeader, live: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor]
) -> None:
    """Gives every second name of stored bytes its tensor: what shared memory may not do so now."""
    for alias, original in header.aliases.items():
        if original in fresh:
            source = fresh[original]
        else:
            source = local_part(live[original].detach())
        if alias not in live:
            fresh[alias] = source if original in fresh else source.to("cpu", copy=True)
            continue
        target = local_part(live[alias].detach())
        if target.data_ptr() != source.data_ptr():
            _require_same_form(alias, target, source.dtype, tuple(source.shape))
            target.copy_(source)


def _require_same_names(header: ImageHeader, live: dict[str, torch.Tensor]) -> None:
    saved = set(header.tensors) | set(header.aliases)
    missing = sorted(name for name in live if name not in saved)
    if missing:
        raise ConfigError(
            f"state: {len(missing)} tensors are not in the checkpoint, first {missing[0]!r}; the "
            "model or optimizer changed since; use --fresh to start over, or the code that wrote it"
        )
    expected = {name.split(".", 1)[0] for name in live if name.startswith("model")}
    gone = sorted(name for name in saved if name.split(".", 1)[0] in expected and name not in live)
    if gone:
        raise ConfigError(
            f"state: the checkpoint has {len(gone)} tensors the model has not, first {gone[0]!r}; "
            "the model changed since; use --fresh to start over, or the code that wrote it"
        )


def _require_same_form(
    name: str, local: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if tuple(local.shape) != tuple(shape) or local.dtype != dtype:
        raise ConfigError(
            f"{name}: is {tuple(local.shape)} {local.dtype} now, {tuple(shape)} {dtype} in the "
            "checkpoint; the state changed shape since; use --fresh to start over, or the code "
            "that wrote it"
        )


class _Scatter:
    """Brings pieces of chunks to the tensors they belong to."""

    def __init__(self, places: list[_Place]) -> None:
        self._places = sorted(places, key=lambda place: place.start)
        self._starts = [place.start for place in self._places]

    def put(self, start: int, data: memoryview) -> None:
        """`data` stands at `start` of the image."""
        stop = start + len(data)
        address = _address(data)
        i = max(0, bisect.bisect_right(self._starts, start) - 1)
        while i < len(self._places) and self._places[i].start < stop:
            place = self._places[i]
            low, high = max(start, place.start), min(stop, place.stop)
            if high > low:
                ctypes.memmove(
                    place.staging.data_ptr() + (low - place.start),
                    address + (low - start),
                    high - low,
                )
            i += 1

    def finish(self) -> None:
        """Copies what went through staging memory (device tensors) to its tensor."""
        for place in self._places:
            if place.target is not None:
                place.target.copy_(place.staging)


def _address(data: memoryview) -> int:
    if data.readonly:
        return ctypes.cast(ctypes.c_char_p(data.obj), ctypes.c_void_p).value or 0  # type: ignore[arg-type]
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
