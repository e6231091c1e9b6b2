"""Whether boxes of all ranks cover a tensor."""

from collections.abc import Iterable, Sequence

import numpy as np

from autockpt.executors.image.layout.boxes import Box
from autockpt.executors.sharding.local_shard import LocalShard


def times_covered(shape: Sequence[int], boxes: Iterable[Box]) -> np.ndarray:
    """How often each element of a tensor of `shape` is in a box."""
    counts = np.zeros(tuple(shape), dtype=int)
    for box in boxes:
        counts[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
    return counts


def taken(holding: LocalShard, whole: np.ndarray) -> np.ndarray:
    """The elements of a holding out of the whole tensor, in the order of its boxes."""
    parts = [
        whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].ravel()
        for box in holding.boxes
    ]
    return np.concatenate([whole.ravel()[:0], *parts])
