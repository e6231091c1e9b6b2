"""Rectangular parts of a global tensor.  Pure geometry: offsets and sizes, in elements.

Every shard of every parallelism is a list of boxes in global coordinates.  A slice of a flattened
tensor (ZeRO, FSDP1) is not one box, but at most 2n-1 boxes for n dimensions.  They follow one
another in memory, so the slice stays one contiguous range of bytes and needs no communication.

Source: ByteCheckpoint (NSDI 2025), decomposition of irregular tensors.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autockpt.values.errors import ConfigError

MAX_BOXES = 1024
"""The most boxes of one tensor on one rank: far more than any parallelism needs, few enough to
compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangular part of a tensor, row-major."""

    offset: tuple[int, ...]
    """First element in each dimension of the whole tensor."""
    shape: tuple[int, ...]
    """Elements in each dimension."""

    @property
    def count(self) -> int:
        """Elements in it; 1 for a part of a 0-d tensor."""
        return math.prod(self.shape)

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Where it stands in `outer`, which contains it."""
        steps = zip(self.offset, outer.offset, self.shape, strict=True)
        return tuple(slice(mine - base, mine - base + size) for mine, base, size in steps)

    def moved(self, by: Sequence[int]) -> "Box":
        """The same part seen from another origin."""
        offset = tuple(mine + step for mine, step in zip(self.offset, by, strict=True))
        return Box(offset=offset, shape=self.shape)

    def __str__(self) -> str:
        ranges = zip(self.offset, self.shape, strict=True)
        return "[" + ", ".join(f"{start}:{start + size}" for start, size in ranges) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box that is the tensor."""
    return Box(offset=(0,) * len(shape), shape=tuple(shape))


def contains(shape: Sequence[int], box: Box) -> bool:
    """`box` is a part of a tensor of `shape`."""
    if not len(shape) == len(box.offset) == len(box.shape):
        return False
    for start, size, total in zip(box.offset, box.shape, shape, strict=True):
        if start < 0 or size < 0 or start + size > total:  # hundreds of tensors: no generator
            return False
    return True


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection; None when it is empty."""
    offset, shape = [], []
    for start, size, other, length in zip(a.offset, a.shape, b.offset, b.shape, strict=True):
        low, high = max(start, other), min(start + size, other + length)
        if high <= low:
            return None
        offset.append(low)
        shape.append(high - low)
    return Box(offset=tuple(offset), shape=tuple(shape))


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return the part of `box` outside `hole`: at most 2n disjoint boxes."""
    inner = intersect(box, hole)
    if inner is None:
        return [box] if box.count else []
    left: list[Box] = []
    offset, shape = list(box.offset), list(box.shape)
    for d, (start, size) in enumerate(zip(inner.offset, inner.shape, strict=True)):
        for low, high in ((offset[d], start), (start + size, offset[d] + shape[d])):
            if high > low:
                left.append(
                    Box(
                        offset=(*offset[:d], low, *offset[d + 1 :]),
                        shape=(*shape[:d], high - low, *shape[d + 1 :]),
                    )
                )
        offset[d], shape[d] = start, size
    return left


def without(boxes: Iterable[Box], hole: Box) -> list[Box]:
    """Return the parts of disjoint `boxes` outside `hole`."""
    return [left for box in boxes for left in subtract(box, hole)]


def flat_range_boxes(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """Boxes covering the flat range [start, stop) of a row-major tensor, in flat order.

    At most 2n-1 boxes for n dimensions: a leading partial row, full rows, a trailing partial row,
    recursively.  Raises ConfigError for a range outside the tensor.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise ConfigError(f"flat range [{start}, {stop}) does not fit a tensor of {total} elements")
    if start == stop:
        return []
    if not shape:
        return [Box(offset=(), shape=())]
    inner = total // shape[0]
    rest = tuple(shape[1:])
    first, lead = divmod(start, inner)
    last, trail = divmod(stop, inner)
    if first == last:
        return _row(first, flat_range_boxes(lead, trail, rest))
    boxes: list[Box] = []
    if lead:
        boxes += _row(first, flat_range_boxes(lead, inner, rest))
        first += 1
    if last > first:
        boxes.append(Box(offset=(first, *(0 for _ in rest)), shape=(last - first, *rest)))
    if trail:
        boxes += _row(last, flat_range_boxes(0, trail, rest))
    return boxes


def _row(index: int, boxes: list[Box]) -> list[Box]:
    return [Box(offset=(index, *box.offset), shape=(1, *box.shape)) for box in boxes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Elements that stand one after another in memory and form a box."""

    box: Box
    """In the coordinates of the whole tensor."""
    start: int
    """First element in the memory of the stored list of boxes."""


def overlaps(boxes: Sequence[Box], start: int, stop: int) -> Iterator[Overlap]:
    """Yield the boxes of the elements [start, stop), where `boxes` follow one another in memory."""
    base = 0
    for box in boxes:
        low, high = max(start, base), min(stop, base + box.count)
        if high > low:
            at = low
            for part in flat_range_boxes(low - base, high - base, box.shape):
                yield Overlap(box=part.moved(box.offset), start=at)
                at += part.count
        base += box.count


def common_runs(part: Box, one: Box, other: Box, *, most: int) -> list[tuple[int, int, int]] | None:
    """Return the runs of `part` that are contiguous in the memory of both boxes, which contain it.

    Rows (first element in the memory of one, in that of the other, elements); None when there are
    more than `most`.
    """
    inner, count = len(part.shape), 1
    while inner:
        inner -= 1
        count *= part.shape[inner]
        if not part.shape[inner] == one.shape[inner] == other.shape[inner]:
            break
    if math.prod(part.shape[:inner]) > most:
        return None
    rows = zip(part.offset[:inner], part.shape[:inner], strict=True)
    outer = (range(first, first + size) for first, size in rows)
    places = (row + part.offset[inner:] for row in itertools.product(*outer))
    return [(flat_index(place, one), flat_index(place, other), count) for place in places]


def flat_index(place: Sequence[int], box: Box) -> int:
    """Number of an element of a box in row-major order."""
    number = 0
    for at, base, size in zip(place, box.offset, box.shape, strict=True):
        number = number * size + at - base
    return number
