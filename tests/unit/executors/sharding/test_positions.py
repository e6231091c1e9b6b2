"""Other ranks go on: each sample of an epoch once, whatever the number of ranks."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from autockpt.executors.restore.progress import merge_positions
from autockpt.executors.state.data.data_position import DataPosition
from autockpt.executors.state.rng import rng_state, set_rng_state
from autockpt.values.errors import ConfigError
from tests.unit.executors.sharding.jobs import Job, Make, position_batches, shared, stored


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A part of a training on one number of ranks."""

    ranks: int
    batch_size: int
    steps: int


LEGS = st.builds(
    Leg, ranks=st.integers(1, 5), batch_size=st.integers(1, 4), steps=st.integers(1, 6)
)


def walk(make: Callable[[int, int, int], Any], legs: Sequence[Leg]) -> dict[int, Counter[int]]:
    """Trains leg after leg, and then on to the end of an epoch; samples seen by epoch."""
    seen: dict[int, Counter[int]] = {}
    saved = None
    for number, leg in enumerate(legs):
        job = Job(partial(make, batch_size=leg.batch_size), leg.ranks, saved)
        epoch = [job.step() for _ in range(leg.steps)][-1]
        saved = job.save()
        while number == len(legs) - 1 and job.step() <= epoch:
            pass
        for at, samples in job.seen.items():
            seen.setdefault(at, Counter()).update(samples)
    del seen[max(seen)]  # it has only begun
    return seen


@settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@given(
    legs=st.lists(LEGS, min_size=2, max_size=4),
    length=st.integers(5, 40),
    seed=st.none() | st.integers(0, 99),
    drop_last=st.booleans(),
)
def test_every_sample_comes_once_an_epoch_however_the_ranks_change(
    legs: list[Leg], length: int, seed: int | None, drop_last: bool
) -> None:
    """Old prefix and new rest are the epoch, but for the tail that DistributedSampler treats so:
    it pads with the first samples of the order, or cuts off the last, fewer than there are ranks.
    """

    def make(rank: int, world: int, batch_size: int) -> DataLoader[Any]:
        sampler = DistributedSampler(
            range(length), world, rank, shuffle=seed is not None, seed=seed or 0,
            drop_last=drop_last,
        )  # fmt: skip
        return DataLoader(range(length), batch_size, sampler=sampler)

    most = max(leg.ranks for leg in legs)
    for epoch, samples in walk(make, legs).items():
        sampler = DistributedSampler(range(length), 1, 0, shuffle=seed is not None, seed=seed or 0)
        sampler.set_epoch(epoch)
        order, once = list(sampler), Counter(range(length))
        if drop_last:
            missing = once - samples
            assert samples + missing == once
            assert missing.total() < most
            assert missing == Counter(order[length - missing.total() :])
        else:
            extra = samples - once
            assert samples == once + extra
            assert extra.total() < most
            assert extra == Counter(order[: extra.total()])


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    legs=st.lists(LEGS, min_size=2, max_size=3), length=st.integers(20, 40), shuffle=st.booleans()
)
def test_one_process_and_many_ranks_share_an_epoch(
    legs: list[Leg], length: int, shuffle: bool
) -> None:
    """The script's usual `sampler = DistributedSampler(data) if world_size > 1 else None`."""

    def make(rank: int, world: int, batch_size: int) -> DataLoader[Any]:
        if world == 1:
            return DataLoader(range(length), batch_size, shuffle=shuffle)
        sampler = DistributedSampler(range(length), world, rank, shuffle=shuffle)
        return DataLoader(range(length), batch_size, sampler=sampler)

    for samples in walk(make, legs).values():
        extra = samples - Counter(range(length))
        assert samples == Counter(range(length)) + extra
        assert extra.total() < max(leg.ranks for leg in legs)


@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
def test_workers_share_the_rest_and_later_epochs_are_plain(persistent: bool) -> None:
    """Processes that load ahead: 2 ranks save after 8 of 22 samples, 3 go on."""
    make = shared(22, workers=2, persistent=persistent)
    first = Job(make, 2)
    assert [first.step() for _ in range(2)] == [0, 0]
    second = Job(make, 3, first.save())
    while second.step() < 2:
        pass
    extra = first.seen[0] + second.seen[0] - Counter(range(22))
    order = list(DistributedSampler(range(22), 1, 0, seed=7))
    assert first.seen[0] + second.seen[0] == Counter(range(22)) + extra
    assert extra == Counter(order[:1])  # 14 were left: 5 for each of 3 ranks, and 1 of them twice
    plain = Job(shared(22), 3)
    while plain.step() < 2:
        pass
    assert second.seen[1] == plain.seen[1]


def test_the_last_short_batch_is_dropped_where_the_loader_says_so() -> None:
    """drop_last of the DataLoader is about batches: the rest is shared, whole batches come."""

    def make(rank: int, world: int) -> DataLoader[Any]:
        sampler = DistributedSampler(range(20), world, rank, shuffle=False)
        return DataLoader(range(20), 3, sampler=sampler, drop_last=True)

    first = Job(make, 2)
    first.step()
    second = Job(make, 1, first.save())
    while second.step() < 1:
        pass
    assert first.seen[0] + second.seen[0] == Counter(range(18))


def test_a_rest_without_a_whole_batch_ends_the_epoch() -> None:
    """Four ranks with batches of 3 find 8 samples left: the next epoch begins, no error."""

    def make(rank: int, world: int) -> DataLoader[Any]:
        sampler = DistributedSampler(range(20), world, rank)
        return DataLoader(range(20), 3, sampler=sampler, drop_last=True)

    first = Job(make, 2)
    assert [first.step(), first.step()] == [0, 0]
    second = Job(make, 4, first.save())
    assert second.step() == 1
    assert second.seen == {1: second.seen[1]}


def test_a_checkpoint_in_a_shared_out_rest_resumes_exactly() -> None:
    """The same number of ranks, after a change: batch for batch, random number for number."""
    make = shared(40)
    first = Job(make, 2)
    first.step()
    second = Job(make, 3, first.save())
    second.step()
    saved, rng = second.save(), rng_state()
    expected = [position_batches(position, 9) for position in second._batches]

    for rank in range(3):
        resumed = DataPosition(make(rank, 3))
        resumed.load(saved[rank])
        resumed.prepare()
        set_rng_state(rng)
        assert position_batches(resumed.batches(), 9) == expected[rank]


def test_data_parallel_ranks_are_the_samplers_and_not_the_jobs() -> None:
    """Two data-parallel ranks of two tensor-parallel ones each; one of four; four of one each."""

    def make(tensor_parallel: int) -> Make:
        def loader(rank: int, world: int) -> DataLoader[Any]:
            replicas = world // tensor_parallel
            sampler = DistributedSampler(range(24), replicas, rank // tensor_parallel, seed=5)
            return DataLoader(range(24), 2, sampler=sampler)

        return loader

    first = Job(make(2), 4)
    first.step()
    second = Job(make(4), 4, first.save())
    second.step()
    third = Job(make(1), 4, second.save())
    while third.step() < 1:
        pass
    seen = Counter[int]()
    for job, copies in ((first, 2), (second, 4), (third, 1)):
        seen.update({sample: count // copies for sample, count in job.seen[0].items()})
    order = list(DistributedSampler(range(24), 1, 0, seed=5))
    # 4 and 2 samples were taken; for the 18 that are left, four ranks pad to 20.
    assert seen == Counter(range(24)) + Counter(order[:2])


def test_ranks_without_data_are_passed_over() -> None:
    """The inner stages of a pipeline have none."""
    job = Job(shared(12), 1)
    job.step()
    (state,) = job.save()
    assert merge_positions([None, None], 0, 3) is None
    merged = merge_positions([None, state], 2, 3)
    assert merged is not None
    assert (merged["epoch"], merged["index"]) == (0, 1)


def test_loaders_that_are_equal_on_all_ranks_stay_where_they_are() -> None:
    """No sampler shares: whoever resumes sees the batches that everybody would have seen."""

    def make(rank: int, world: int) -> DataLoader[Any]:
        return DataLoader(range(23), 4, shuffle=True)

    torch.manual_seed(3)
    position = DataPosition(make(0, 2))
    batches = position.batches()
    position_batches(batches, 2)
    state = stored(position.state())
    rng = rng_state()
    expected = position_batches(batches, 8)
    for rank in range(3):
        merged = merge_positions([state, state], rank, 3)
        resumed = DataPosition(make(rank, 3))
        assert merged is not None
        resumed.load(merged)
        resumed.prepare()
        set_rng_state(rng)
        assert position_batches(resumed.batches(), 8) == expected


def test_generators_of_one_rank_serve_others_only_where_they_gave_the_order() -> None:
    """Else the workers of all ranks would augment alike until the epoch ends."""
    for shuffle in (False, True):
        position = DataPosition(DataLoader(range(9), 2, shuffle=shuffle))
        next(position.batches())
        merged = merge_positions([position.state()], 1, 2)
        assert merged is not None
        assert (merged["shuffle"] is not None) == shuffle


def test_ranks_that_stand_apart_are_refused() -> None:
    """No prefix of one order was taken."""
    job = Job(shared(12), 2)
    job.step()
    behind, ahead = job.save()
    ahead["index"] += 1
    with pytest.raises(ConfigError, match="stood at different places"):
        merge_positions([behind, ahead], 0, 1)


def test_a_sampler_that_nobody_knows_needs_the_same_ranks() -> None:
    """The same goes for checkpoints from before the position said how ranks share."""
    loader: DataLoader[Any] = DataLoader(range(12), batch_sampler=[[1, 2], [3, 4]])
    position = DataPosition(loader)
    next(position.batches())
    with pytest.raises(ConfigError, match="does not say how its ranks shared"):
        merge_positions([position.state()] * 2, 0, 3)
