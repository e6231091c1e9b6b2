"""Random ways to hold a tensor: cut along its dimensions, as ranges of its elements, in copies.

Every element of a tensor is its own number, so that whoever gets the wrong one is found out.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from autockpt.executors.image.container import ImageIndex
from autockpt.executors.image.layout.boxes import Box, flat_range_boxes, whole
from autockpt.executors.restore.plan.stored import Piece
from autockpt.values.generation import Generation

Part = tuple[Box, ...]
DTYPE = torch.int32


def random_shape(rng: random.Random) -> tuple[int, ...]:
    """0 to 4 dimensions, up to 400 elements."""
    dimensions = rng.randrange(5)
    return tuple(rng.randint(1, (20, 20, 9, 5, 4)[dimensions]) for _ in range(dimensions))


def box_cuts(rng: random.Random, shape: Sequence[int]) -> list[Box]:
    """The tensor cut into disjoint boxes, again and again."""
    boxes = [whole(shape)]
    for _ in range(rng.randrange(7)):
        box = boxes.pop(rng.randrange(len(boxes)))
        wide = [d for d, size in enumerate(box.shape) if size > 1]
        if not wide:
            boxes.append(box)
            continue
        d = rng.choice(wide)
        at = rng.randint(1, box.shape[d] - 1)
        for low, high in ((0, at), (at, box.shape[d])):
            offset = (*box.offset[:d], box.offset[d] + low, *box.offset[d + 1 :])
            boxes.append(
                Box(offset=offset, shape=(*box.shape[:d], high - low, *box.shape[d + 1 :]))
            )
    return boxes


def flat_cuts(rng: random.Random, shape: Sequence[int]) -> list[Part]:
    """The elements in row-major order cut into ranges, some of them empty."""
    total = math.prod(shape)
    cuts = sorted(rng.randint(0, total) for _ in range(rng.randrange(6)))
    ranges = zip([0, *cuts], [*cuts, total], strict=True)
    return [tuple(flat_range_boxes(start, stop, shape)) for start, stop in ranges]


def cutting(rng: random.Random, shape: Sequence[int]) -> list[Part]:
    """Parts that make up the tensor, each element in exactly one of them."""
    if rng.random() < 0.5:
        return flat_cuts(rng, shape)
    boxes = box_cuts(rng, shape)
    rng.shuffle(boxes)
    parts: list[list[Box]] = [[] for _ in range(rng.randint(1, len(boxes)))]
    for box in boxes:
        rng.choice(parts).append(box)
    return [tuple(part) for part in parts]


def stored(rng: random.Random, shape: Sequence[int]) -> list[Part]:
    """Parts of all shards: they cover the tensor, and some of it more than once."""
    parts = [part for part in cutting(rng, shape) if part]
    if rng.random() < 0.3:  # replicas, on ranks that are cut in the same way or in another one
        parts += rng.choices(parts, k=2) if rng.random() < 0.5 else cutting(rng, shape)
    rng.shuffle(parts)
    return [part for part in parts if part]


def elements(shape: Sequence[int], part: Part) -> NDArray[np.int32]:
    """The numbers of a part's elements, in the order of its memory."""
    numbers = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    origin = whole(shape)
    views = [numbers[box.slices_in(origin)].reshape(-1) for box in part]
    return np.concatenate(views) if views else np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Shard:
    """An image that holds one piece of the tensor somewhere."""

    piece: Piece
    image: bytearray
    index: ImageIndex

    def chunks(self) -> Iterator[tuple[int, int, memoryview]]:
        """(number, start, bytes) of each."""
        for number in range(len(self.index.digests)):
            start, stop = self.index.chunk_range(number)
            yield number, start, memoryview(self.image)[start:stop]


def shard(rng: random.Random, number: int, shape: tuple[int, ...], part: Part) -> Shard:
    """A part in an image of its own, at a random place, in chunks of a random size."""
    body = elements(shape, part).tobytes()
    start = DTYPE.itemsize * rng.randrange(9)
    image = bytearray(start) + body + bytes(rng.randrange(9)) + b" "
    # Chunks are whole pages and elements never lie across them; here pages are one element.
    chunk_bytes = DTYPE.itemsize * rng.randint(1, 1 + len(image) // DTYPE.itemsize)
    index = ImageIndex(
        run_id="run", generation=Generation(term=1, step=1), step=1, rank=number, world_size=1,
        layout_digest="", image_bytes=len(image), chunk_bytes=chunk_bytes,
        digests=("",) * -(-len(image) // chunk_bytes),
    )  # fmt: skip
    piece = Piece(
        shard=number, start=start, dtype=DTYPE, shape=(len(body) // DTYPE.itemsize,),
        global_shape=shape, boxes=part, declared=True,
    )  # fmt: skip
    return Shard(piece, image, index)
