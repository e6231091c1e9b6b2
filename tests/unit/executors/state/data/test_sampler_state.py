"""An epoch's order shared out among replicas: nothing dropped, nothing twice, but for the tail."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from autockpt.executors.state.data.sampler_state import (
    EpochOrder,
    Place,
    Share,
    continued,
    place_of,
    rank_in,
    rest_of,
    whole_order,
)
from autockpt.values.errors import ConfigError

SHARES = st.builds(
    Share,
    replicas=st.integers(1, 7),
    batch_size=st.integers(1, 5),
    drop_last=st.booleans(),
)
PLAIN = EpochOrder(sampler="SequentialSampler", length=20)
ONE = Share(replicas=1, batch_size=4)


@given(length=st.integers(0, 40), share=SHARES, seed=st.none() | st.integers(0, 9))
def test_a_whole_epoch_is_dealt_out_as_the_sampler_does(
    length: int, share: Share, seed: int | None
) -> None:
    """Every rank gets from us what torch's DistributedSampler gives it, padding included."""
    for rank in range(share.replicas):
        sampler = DistributedSampler(
            range(length), share.replicas, rank, shuffle=seed is not None, seed=seed or 0,
            drop_last=share.drop_last,
        )  # fmt: skip
        sampler.set_epoch(3)
        loader: DataLoader[Any] = DataLoader(range(length), sampler=sampler)
        place = place_of(loader)
        assert place is not None
        order = whole_order(place.order, 3, loader)
        assert sorted(order) == list(range(length))
        expected = list(sampler) if length else []
        assert rest_of(order, 0, share, rank_in(loader)) == expected


@given(length=st.integers(1, 60), share=SHARES, start=st.integers(0, 60))
def test_the_rest_is_shared_evenly_and_its_tail_alone_is_padded_or_cut(
    length: int, share: Share, start: int
) -> None:
    """Parts are equally long; what is twice are the order's first samples, what is not its last."""
    samples, start = list(range(length)), min(start, length)
    parts = [rest_of(samples, start, share, rank) for rank in range(share.replicas)]
    assert len({len(part) for part in parts}) == 1
    dealt, left = Counter(x for part in parts for x in part), Counter(samples[start:])
    total, tail = dealt.total(), (length - start) % share.replicas
    if share.drop_last:
        assert dealt == Counter(samples[start : length - tail])
    else:
        padding = total - left.total()
        assert padding == (share.replicas - tail if tail else 0) < share.replicas
        assert dealt - left == Counter(samples[i % length] for i in range(padding))


@given(length=st.integers(1, 60), share=SHARES, start=st.integers(0, 60), index=st.integers(0, 20))
def test_what_was_taken_is_what_the_batches_held(
    length: int, share: Share, start: int, index: int
) -> None:
    """The count of samples agrees with walking the batches, a short last batch included."""
    start = min(start, length)
    order = EpochOrder(sampler="DistributedSampler", length=length)
    place = Place(order=order, share=share, start=start, index=index)
    held: set[int] = set(range(start))
    for rank in range(share.replicas):
        part = rest_of(range(length), start, share, rank)
        for batch in list(BatchSampler(part, share.batch_size, drop_last=False))[:index]:
            held.update(batch)
    assert held >= set(range(place.taken))
    assert held - set(range(place.taken)) == set()


def test_the_same_share_goes_on_counting_batches() -> None:
    """Nothing changes for a loader like the one that saved, also after an earlier change."""
    for start in (0, 7):
        old = Place(order=PLAIN, share=ONE, start=start, index=2)
        assert continued(old, Place(order=PLAIN, share=ONE)) == old


@pytest.mark.parametrize(
    ("share", "taken"),
    [
        (Share(replicas=1, batch_size=5), 8),
        (Share(replicas=2, batch_size=4), 8),
        (Share(replicas=1, batch_size=1, drop_last=True), 8),
    ],
)
def test_another_share_goes_on_after_the_samples_taken(share: Share, taken: int) -> None:
    """Batch size and number of replicas may change: samples count."""
    old = Place(order=PLAIN, share=ONE, index=2)
    new = continued(old, Place(order=PLAIN, share=share))
    assert (new.start, new.index, new.share, new.taken) == (taken, 0, share, taken)


def test_an_epoch_that_nobody_began_is_begun_by_the_new_loader() -> None:
    """With its own order, whatever the other's was."""
    own = Place(order=EpochOrder(sampler="DistributedSampler", length=9, seed=1), share=ONE)
    assert continued(Place(order=PLAIN, share=ONE), own) == own


def of(sampler: str, length: int = 20, seed: int | None = None) -> EpochOrder:
    """An order."""
    return EpochOrder(sampler=sampler, length=length, seed=seed)


@pytest.mark.parametrize(
    ("old", "own", "message"),
    [
        (PLAIN, None, "sampler shares samples is not known"),
        (PLAIN, of("SequentialSampler", 10), "had 20 samples, this loader's has 10"),
        (
            of("DistributedSampler", seed=3), of("DistributedSampler", seed=4),
            "shuffled with seed 3, this one shuffles with 4",
        ),
        (
            of("DistributedSampler", seed=3), of("DistributedSampler"),
            r"seed 3, this one shuffles with none \(no shuffle\)",
        ),
        (of("WeightedRandomSampler"), PLAIN, "begun in the order of a WeightedRandomSampler"),
        (of("Subclass", seed=3), PLAIN, "begun in the order of a Subclass"),
    ],
    ids=["unknown sampler", "length", "seed", "shuffle", "weighted", "subclass"],
)  # fmt: skip
def test_an_order_that_cannot_be_gone_on_with_is_refused(
    old: EpochOrder, own: EpochOrder | None, message: str
) -> None:
    """With what differs, instead of dropping or repeating samples silently."""
    live = None if own is None else Place(order=own, share=ONE)
    with pytest.raises(ConfigError, match=message):
        continued(Place(order=old, share=ONE, index=1), live)


class Blocks(DistributedSampler[int]):
    """Gives every rank a block of its own instead of dealing out."""

    def __iter__(self) -> Any:
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


class Weighted(DistributedSampler[int]):
    """Deals out, in an order of its own."""

    def __iter__(self) -> Any:
        order = [x * 7 % len(self.dataset) for x in range(len(self.dataset))]
        order += order[: self.total_size - len(order)]
        return iter(order[self.rank : self.total_size : self.num_replicas])


def test_a_sampler_of_another_class_is_tried_before_it_is_trusted() -> None:
    """A subclass that deals one order out is shared anew; one that gives blocks is refused."""
    loader: DataLoader[Any] = DataLoader(range(10), sampler=Weighted(range(10), 3, 1))
    assert whole_order(of("Weighted", 10, 0), 0, loader) == [x * 7 % 10 for x in range(10)]
    blocks: DataLoader[Any] = DataLoader(range(10), sampler=Blocks(range(10), 2, 1))
    with pytest.raises(ConfigError, match="a Blocks does not share one order out"):
        whole_order(of("Blocks", 10, 0), 0, blocks)


class Own(Sampler[int]):
    """A sampler that nobody knows."""

    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(range(9), batch_size=2), ("SequentialSampler", 1, 2)),
        (DataLoader(range(9), batch_size=None, shuffle=True), ("RandomSampler", 1, 1)),
        (
            DataLoader(range(9), sampler=RandomSampler(range(9), replacement=True)),
            ("special RandomSampler", 1, 1),
        ),
        (
            DataLoader(
                range(9), batch_sampler=BatchSampler(DistributedSampler(range(9), 3, 1), 2, False)
            ),
            ("DistributedSampler", 3, 2),
        ),
        (DataLoader(range(9), batch_sampler=[[1, 2], [3]]), None),
        (DataLoader(range(9), sampler=Own()), None),
    ],
    ids=["in order", "no batches", "replacement", "batch sampler", "list of batches", "own"],
)
def test_a_loader_says_how_it_shares(
    loader: "DataLoader[Any]", expected: tuple[str, int, int] | None
) -> None:
    """Batch samplers are looked into; what nobody knows is not guessed."""
    place = place_of(loader)
    if expected is None or place is None:
        assert place is None
        assert expected is None
    else:
        share = place.share
        assert (place.order.sampler, share.replicas, share.batch_size) == expected
        assert place.order.length == 9


def test_a_sequential_order_needs_no_loader_of_its_kind() -> None:
    """An epoch begun in one process goes on under a DistributedSampler."""
    loader: DataLoader[Any] = DataLoader(range(5), sampler=DistributedSampler(range(5), 2, 0))
    assert whole_order(of("SequentialSampler", 5), 0, loader) == list(SequentialSampler(range(5)))
