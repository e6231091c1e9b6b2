"""A load plan: which bytes of which shard one rank reads, and where each tensor goes.

A plan holds no memory and reads nothing.  It can be printed, compared and carried out.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autockpt.executors.restore.plan.moves import Read
from autockpt.executors.restore.plan.saved_optimizer import SavedOptimizer
from autockpt.executors.restore.plan.stored import Piece
from autockpt.executors.sharding.local_shard import LocalShard

Look = tuple[tuple[int, ...], torch.dtype]
"""Shape and type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor to fill, each memory once."""

    name: str
    holding: LocalShard
    shape: tuple[int, ...]
    """Shape of the local tensor, padding included."""
    dtype: torch.dtype
    live: bool
    """It fills a live tensor; else it is a new one."""
    in_place: bool
    """Bytes go straight into the live tensor."""
    strides: tuple[int, ...] | None
    """Strides of a new tensor that is not contiguous."""
    copies: tuple[str, ...]
    """Stored tensors whose mean it is; (): the stored tensor of its name."""
    reads: tuple[tuple[Read, ...], ...]
    """By stored tensor the pieces that fill it; (): the checkpoint does not fit."""

    @property
    def nbytes(self) -> int:
        """Bytes of the local tensor, padding included."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def resharded(self) -> bool:
        """It is cut out of pieces, put together from several, or averaged."""
        return bool(self.copies) or any(read.regions is not None for read in self.parts())

    def parts(self) -> Iterator[Read]:
        """Every piece that is read, of all stored tensors."""
        for reads in self.reads:
            yield from reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A tensor that several ranks stored as their own; a restore needs all copies to be equal."""

    name: str
    pieces: tuple[Piece, ...]
    refusal: str
    """The message if the copies differ."""

    @property
    def alike(self) -> bool:
        """All copies have one shape and type."""
        return len({(piece.global_shape, piece.dtype) for piece in self.pieces}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """All steps of one rank to restore one checkpoint."""

    home: int
    """The shard whose private state this rank takes."""
    tensors: tuple[PlannedTensor, ...]
    """In the order in which memory is made for them."""
    aliases: Mapping[str, str]
    """By second name the first one; both share memory in the home shard."""
    skeleton: Mapping[str, Any]
    """Everything in the home shard that is no tensor."""
    optimizers: Mapping[str, SavedOptimizer]
    placed: frozenset[str]
    """Optimizer state that is divided as its parameter is."""
    compared: tuple[Comparison, ...]
    """Read and compared before the live state changes."""
    merged: tuple[int, ...]
    """Shards whose progress and random state are merged; (): this rank takes its own."""
    as_built: tuple[str, ...]
    """Buffers that do not persist and are not what was saved: they stay as the model made them."""
    awaited: Mapping[str, Look] | None
    """Parameters and buffers that the script builds in its loop; None: all is there."""
    exact: bool
    """Nothing but the home shard is needed, and it was written by a rank like this one."""
    refusals: tuple[str, ...]
    """Why checkpoint and live state do not fit, one sentence each; (): they fit."""

    def bytes_by_shard(self) -> dict[int, int]:
        """Bytes of tensors that are taken from each shard; the rest of a chunk is not counted."""
        found: dict[int, int] = {}
        for tensor in self.tensors:
            for read in tensor.parts():
                taken = read.elements * read.piece.dtype.itemsize
                found[read.piece.shard] = found.get(read.piece.shard, 0) + taken
        return dict(sorted(found.items()))


class PlanMade(SystemExit):
    """Ends a script that was started for the load plan of this rank alone."""

    def __init__(self, plan: LoadPlan) -> None:
        super().__init__(0)
        self.plan = plan
