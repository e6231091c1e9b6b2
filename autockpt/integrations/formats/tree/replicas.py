"""Do the ranks hold the same?

State that data parallelism keeps equal must be equal, before it is one tensor.  Where replicated
state is divided among ranks nothing stands twice.  Ranks of other nodes keep it a second time, and
every rank keeps its own plain tensors that have no declaration.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

import torch

from autockpt.executors.image.layout.boxes import Box, intersect
from autockpt.executors.restore.plan.stored import Piece
from autockpt.integrations.formats.convert.image_reader import Images
from autockpt.values.errors import ConfigError

BLOCK = 2**22
"""Bytes compared at a time."""


def require_same(images: Images, names: Iterable[str], where: str) -> None:
    """Raises ConfigError unless every element of these tensors has one value in all images."""
    for name in names:
        pieces = images.stored.pieces(name)
        other = _other_than_the_rest(images, name, pieces) if len(pieces) > 1 else None
        if other is not None:
            raise ConfigError(
                f"{where}: rank {other[1].shard} does not hold the same {name} as rank "
                f"{other[0].shard}, and nothing says how they are parts of one. --rank N takes "
                "that of one rank"
            )


def _other_than_the_rest(
    images: Images, name: str, pieces: Sequence[Piece]
) -> tuple[Piece, Piece] | None:
    """Two pieces that contradict each other."""
    first: dict[tuple[Box, ...], Piece] = {}
    for piece in pieces:
        if (piece.global_shape, piece.dtype) != (pieces[0].global_shape, pieces[0].dtype):
            return pieces[0], piece
        known = first.setdefault(piece.boxes, piece)
        if known is not piece and not _same_bytes(images, known, piece):
            return known, piece
    distinct = list(first.values())
    held = sum(box.count for piece in distinct for box in piece.boxes)
    if held <= math.prod(pieces[0].global_shape):  # disjoint: together they have to be all of it
        return None
    for a, b in itertools.combinations(distinct, 2):
        if not _agree(images, name, a, b):
            return a, b
    return None


def _same_bytes(images: Images, a: Piece, b: Piece) -> bool:
    """Of two pieces of the same boxes; digests of whole chunks spare most of the reading."""
    stop_a, stop_b = a.start + a.nbytes, b.start + b.nbytes
    if images.digests(a.shard, a.start, stop_a) == images.digests(b.shard, b.start, stop_b):
        return True
    for at in range(0, a.nbytes, BLOCK):
        more = min(at + BLOCK, a.nbytes)
        mine = images.raw(a.shard, a.start + at, a.start + more)
        if mine != images.raw(b.shard, b.start + at, b.start + more):
            return False
    return True


def _agree(images: Images, name: str, a: Piece, b: Piece) -> bool:
    """Two pieces of other boxes have the same elements where they overlap."""
    mine, theirs = images.lazy(name, [a]), images.lazy(name, [b])
    for x, y in itertools.product(a.boxes, b.boxes):
        both = intersect(x, y)
        if both is not None and not torch.equal(
            mine.part(both).view(-1).view(torch.uint8), theirs.part(both).view(-1).view(torch.uint8)
        ):
            return False
    return True
