"""This rank's part of a live tensor, and the ranks that hold the same part.

DTensors say so themselves.  For plain tensors only the wrapper knows (DDP, FSDP1, ZeRO).  A
collector's declaration for a parameter also holds for optimizer state of the same shape.  A plain
tensor without a declaration is whole and this rank's own.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autockpt.executors.image.layout.boxes import MAX_BOXES, Box, contains, whole
from autockpt.values.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """This rank's part of one global tensor."""

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """Disjoint; they follow one another in the memory of the local tensor."""
    holders: tuple[int, ...] = ()
    """Ranks known to hold the same bytes, ascending, this one among them; (): only this one."""

    def __post_init__(self) -> None:
        if len(self.boxes) > MAX_BOXES:
            raise ConfigError(
                f"{len(self.boxes)} boxes of a tensor, at most {MAX_BOXES}; join some"
            )
        for box in self.boxes:
            if not contains(self.global_shape, box):
                raise ConfigError(f"box {box} is no part of a tensor of {self.global_shape}")

    @property
    def count(self) -> int:
        """Elements of the local tensor."""
        return sum(box.count for box in self.boxes)

    @property
    def is_whole(self) -> bool:
        """The local tensor is the global one."""
        return self.boxes == (whole(self.global_shape),)


def whole_of(tensor: torch.Tensor, holders: tuple[int, ...] = ()) -> LocalShard:
    """The holding of a plain tensor."""
    shape = tuple(tensor.shape)
    return LocalShard(global_shape=shape, boxes=(whole(shape),), holders=holders)


def holding_of(tensor: torch.Tensor) -> LocalShard | None:
    """Return the holding that a distributed tensor declares; None for a plain one.

    Raises ConfigError for one whose parts still have to be added up.
    """
    chunks_of = getattr(tensor, "__create_chunk_list__", None)
    if chunks_of is None:
        return None
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return _in_chunks(tensor, chunks_of())
    placements: Sequence[Any] = tensor.placements  # type: ignore[attr-defined]  # a DTensor
    here = tuple(mesh.get_coordinate() or ())
    kind, known = (tuple(tensor.shape), placements, here), _KNOWN.setdefault(mesh, {})
    if kind not in known:
        if any(placement.is_partial() for placement in placements):
            raise ConfigError(
                "a distributed tensor with Partial placements is a pending sum and cannot be "
                "saved; call full_tensor() or redistribute it"
            )
        known[kind] = _in_chunks(tensor, chunks_of(), _same_part(mesh, placements, here))
    return known[kind]


_KNOWN: weakref.WeakKeyDictionary[Any, dict[Any, LocalShard]] = weakref.WeakKeyDictionary()
"""By mesh, then by shape, placements and place.  At every query torch divides anew and builds the
tensor of the mesh, 0.4 ms in all.  Hundreds of tensors share few kinds."""


def _in_chunks(
    tensor: torch.Tensor, chunks: Sequence[Any], holders: tuple[int, ...] = ()
) -> LocalShard:
    places = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    return LocalShard(
        global_shape=tuple(tensor.shape),
        boxes=tuple(Box(offset=o, shape=s) for o, s in places if math.prod(s)),
        holders=holders,
    )


def _same_part(mesh: Any, placements: Sequence[Any], here: Sequence[int]) -> tuple[int, ...]:
    """Ranks along the replicated dimensions of a mesh, if there are more than the one `here`."""
    if not here:
        return ()  # outside of it
    places = zip(placements, here, strict=True)
    index = tuple(slice(None) if placement.is_replicate() else at for placement, at in places)
    ranks = sorted(int(rank) for rank in mesh.mesh[index].flatten())
    return tuple(ranks) if len(ranks) > 1 else ()


def ranks_sharing(tensor: torch.Tensor, declared: LocalShard | None) -> int:
    """Number of ranks known to share or copy a tensor; 1 when unknown."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None:
        return int(mesh.size())
    return 1 if declared is None else max(1, len(declared.holders))


def follow(
    state: torch.Tensor, parameter: torch.Tensor, declared: LocalShard | None
) -> LocalShard | None:
    """The holding of optimizer state; None: unknown.

    Its own, or that of its parameter when it has its shape.  A step count is the same wherever the
    parameter is, and all state is where the whole parameter is.
    """
    own = holding_of(state)
    if own is not None:
        return own
    if declared is not None and state.dim() and tuple(state.shape) == tuple(parameter.shape):
        return declared
    known = declared or holding_of(parameter)
    if known is None or (state.numel() != 1 and not known.is_whole):
        return None
    return whole_of(state, known.holders if state.numel() != 1 else ())


Declared = Mapping[int, LocalShard]
"""By id of a plain parameter what a collector knows of it."""
