"""Any cutting in, any cutting out: each element of the target exactly once."""

import random

import numpy as np
import pytest
import torch

from autockpt.executors.image.layout.boxes import Box, whole
from autockpt.executors.restore.plan.moves import Loading, Want, moves_for
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from tests.unit.executors.sharding.cuttings import (
    DTYPE,
    Part,
    Shard,
    cutting,
    elements,
    random_shape,
    shard,
    stored,
)

CASES = 20_000
SAMPLE = 1_500


def wanted(shape: tuple[int, ...], part: Part) -> Want:
    """A target full of a number that no element is."""
    holding = LocalShard(global_shape=shape, boxes=part)
    return Want(name="w", holding=holding, memory=torch.full((holding.count,), -1, dtype=DTYPE))


def shards_of(rng: random.Random, shape: tuple[int, ...]) -> list[Shard]:
    """A checkpoint of one tensor."""
    return [shard(rng, i, shape, part) for i, part in enumerate(stored(rng, shape))]


def load(rng: random.Random, want: Want, shards: list[Shard]) -> int:
    """Reads what it says it needs, in any order; the number of chunks that it did not need."""
    moves = moves_for(want, [s.piece for s in shards])
    assert sum(move.elements for move in moves) == want.holding.count
    loading = Loading(moves)
    if rng.random() < 0.3:
        for one in shards:
            head = memoryview(one.image)[: rng.randint(1, len(one.image))]
            loading.put_head(one.piece.shard, head)
    jobs, spared = [], 0
    for one in shards:
        needed = loading.chunks(one.piece.shard, one.index)
        jobs += [(one, start, data) for i, start, data in one.chunks() if i in needed]
        spared += len(one.index.digests) - len(needed)
    rng.shuffle(jobs)
    for one, start, data in jobs:
        loading.put(one.piece.shard, start, data)
    loading.finish()
    return spared


def check_case(seed: int) -> int:
    """One random tensor, stored in one way and wanted in another."""
    rng = random.Random(seed)
    shape = random_shape(rng)
    want = wanted(shape, rng.choice(cutting(rng, shape)))
    spared = load(rng, want, shards_of(rng, shape))
    expected = elements(shape, want.holding.boxes)
    assert np.array_equal(want.memory.numpy(), expected), f"seed {seed}"
    return spared


def test_every_element_of_the_target_is_written_exactly_once() -> None:
    """A sample of the cases; what nobody needs is not read."""
    assert sum(check_case(seed) for seed in range(SAMPLE)) > SAMPLE


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_element_is_written_exactly_once_in_all_cases() -> None:
    """Dimensions, ranges, replicas, heads, chunks of any size: 20,000 further cases."""
    for seed in range(SAMPLE, SAMPLE + CASES):
        check_case(seed)


def test_a_hole_in_the_shards_is_named_before_a_byte_is_written() -> None:
    """Which tensor, how many elements, which box."""
    missing = 0
    for seed in range(300):
        rng = random.Random(seed)
        shape = random_shape(rng)
        parts = [part for part in cutting(rng, shape) if part]
        if len(parts) < 2:
            continue
        gone = parts.pop(rng.randrange(len(parts)))
        pieces = [shard(rng, i, shape, part).piece for i, part in enumerate(parts)]
        want = wanted(shape, (whole(shape),))
        count = sum(box.count for box in gone)
        with pytest.raises(ConfigError, match=f"w: {count} of {want.holding.count} elements"):
            moves_for(want, pieces)
        missing += 1
    assert missing > 100


def test_bytes_that_come_twice_or_never_are_found() -> None:
    """An index that lies about its chunks does not go by unseen."""
    rng = random.Random(3)
    shape = (6, 5)
    for times, words in ((0, "never"), (2, "more than once")):
        (one,) = [shard(rng, 0, shape, (whole(shape),))]
        want = wanted(shape, (Box(offset=(1, 0), shape=(3, 5)),))
        loading = Loading(moves_for(want, [one.piece]))
        for _ in range(times):
            for _, start, data in one.chunks():
                loading.put(0, start, data)
        with pytest.raises(CorruptCheckpointError, match=f"w: 15 elements were written {words}"):
            loading.finish()


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [((4, 6), torch.int32, r"is \(4, 5\)"), ((4, 5), torch.float32, "float32 in the checkpoint")],
)
def test_another_global_shape_or_dtype_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype, words: str
) -> None:
    """Nothing is cast, padded or cut by guess."""
    piece = shard(random.Random(1), 0, shape, (whole(shape),)).piece
    other = type(piece)(
        shard=0,
        start=0,
        dtype=dtype,
        shape=shape,
        global_shape=shape,
        boxes=piece.boxes,
        declared=True,
    )
    with pytest.raises(ConfigError, match=words):
        moves_for(wanted((4, 5), (whole((4, 5)),)), [other])


def test_the_first_piece_that_fits_whole_is_preferred_to_parts() -> None:
    """A rank's own shard comes first: nothing is put together that stands there in one."""
    shape, rng = (8, 3), random.Random(2)
    parts: list[Part] = [(Box(offset=(4 * i, 0), shape=(4, 3)),) for i in range(2)]
    pieces = [shard(rng, i, shape, part).piece for i, part in enumerate([*parts, (whole(shape),)])]
    (move,) = moves_for(wanted(shape, (whole(shape),)), pieces)
    assert (move.piece.shard, move.regions) == (2, None)
