"""Ranges along one dimension of a tensor, as boxes in the order of a local tensor's memory."""

import itertools
from collections.abc import Sequence

from autockpt.executors.image.layout.boxes import Box


def slab_boxes(
    shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]
) -> tuple[Box, ...]:
    """The boxes of a local tensor that joins `ranges` (first, past the last) along `dim`.

    One box a range where that is how they stand in memory: in dimension 0, or when there is one
    range.  Else one for every range and index of the dimensions before `dim`.
    """
    if not shape:
        return (Box(offset=(), shape=()),)
    kept = [(low, high) for low, high in ranges if high > low]
    lead = tuple(shape[:dim])
    grain = lead if len(kept) == 1 else (1,) * dim
    starts = itertools.product(
        *(range(0, n, step or 1) for n, step in zip(lead, grain, strict=True))
    )
    rest = tuple(shape[dim + 1 :])
    if 0 in lead or 0 in rest:
        return ()
    return tuple(
        Box(offset=(*start, low, *(0 for _ in rest)), shape=(*grain, high - low, *rest))
        for start in starts
        for low, high in kept
    )
