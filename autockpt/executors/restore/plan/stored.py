"""The tensors in a generation's shards: every stored tensor as a piece of a global one."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from autockpt.executors.image.container import ImageHeader
from autockpt.executors.image.dtypes import true_form
from autockpt.executors.image.layout.boxes import Box, whole
from autockpt.executors.image.layout.plan import EXTRA
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.values.errors import CorruptCheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a global tensor that stands in one shard."""

    shard: int
    start: int
    """First byte in the shard's image."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape on the rank that wrote it."""
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """In the order of its bytes."""
    declared: bool
    """The shard says which part of a global tensor it is; else it is whole, and its rank's own."""

    @property
    def nbytes(self) -> int:
        """Bytes in the image."""
        return self.dtype.itemsize * sum(box.count for box in self.boxes)


class Stored:
    """Pieces by name, of the shards whose headers were read."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        self._shards: set[int] = set()

    def __contains__(self, shard: int) -> bool:
        return shard in self._shards

    def add(self, shard: int, header: ImageHeader) -> None:
        """Takes in the header of a shard.  Raises CorruptCheckpointError when it lies."""
        self._shards.add(shard)
        found = {name: _piece(shard, header, name) for name in header.tensors if name != EXTRA}
        found |= {alias: found[name] for alias, name in header.aliases.items() if name in found}
        for name, piece in found.items():
            self._pieces.setdefault(name, []).append(piece)

    def pieces(self, name: str) -> list[Piece]:
        """All pieces of a tensor, of the shards in the order in which they were added."""
        return self._pieces.get(name, [])

    def declare(self, name: str, holding: LocalShard) -> None:
        """The first piece of a tensor is this part; its rank did not know of what."""
        first, *rest = self._pieces[name]
        part = replace(first, global_shape=holding.global_shape, boxes=holding.boxes, declared=True)
        self._pieces[name] = [part, *rest]

    def names(self) -> Iterable[str]:
        """Every name, second names too."""
        return self._pieces.keys()


def _piece(shard: int, header: ImageHeader, name: str) -> Piece:
    place = header.tensors[name]
    dtype, shape = true_form(header, name)
    part = header.parts.get(name)
    if part is not None and sum(box.count for box in part.boxes) != math.prod(shape):
        raise CorruptCheckpointError(
            f"{name}: holds {math.prod(shape)} elements, its boxes say otherwise; the header lies"
        )
    return Piece(
        shard=shard,
        start=place.start,
        dtype=dtype,
        shape=shape,
        global_shape=shape if part is None else part.global_shape,
        boxes=(whole(shape),) if part is None else part.boxes,
        declared=part is not None,
    )
