"""Loaders with a state of their own: batches and random numbers go on as if nothing had been."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from autockpt.executors.state.data.data_position import DataPosition
from autockpt.executors.state.data.loader_rng import preserve_rng
from autockpt.executors.state.rng import rng_state, set_rng_state
from tests.unit.executors.sharding.jobs import stored

ITEMS = 7
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Counting(DataLoader[Any]):
    """Skips what it gave before, and makes its iterator with the first batch."""

    given = 0

    def __iter__(self) -> Any:
        for at, batch in enumerate(super().__iter__()):
            if at >= self.given:
                self.given += 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Ending(Counting):
    """Does not look for what is left where it knows that nothing is."""

    def __iter__(self) -> Any:
        if self.given == len(self):
            self.given = 0
            return iter(())
        return super().__iter__()


class AtOnce(Counting):
    """Makes its iterator as soon as it is asked, as DataLoader does."""

    def __iter__(self) -> Any:
        self._left = itertools.islice(DataLoader.__iter__(self), self.given, None)
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._left)
        except StopIteration:
            self.given = 0
            raise
        self.given += 1
        return batch


class Around:
    """No DataLoader, but has one."""

    def __init__(self, loader: AtOnce) -> None:
        self.loader = loader
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class Stream(IterableDataset[Any]):
    """Cannot be skipped by index."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(ITEMS))


def sampler() -> DistributedSampler[Any]:
    """Shuffles by seed and epoch."""
    return DistributedSampler(range(ITEMS), 1, 0, seed=2)  # type: ignore[arg-type]


def torchdata_loader(*args: Any, **options: Any) -> Any:
    """torchdata's own; the test is skipped where it is not installed."""
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(*args, **options)


STATEFUL: dict[str, Callable[[], Any]] = {
    "with the first batch": lambda: Counting(range(ITEMS), sampler=sampler()),
    "workers with the first batch": lambda: Counting(
        range(ITEMS), sampler=sampler(), num_workers=1
    ),
    "none at the end": lambda: Ending(range(ITEMS), sampler=sampler()),
    "at once": lambda: AtOnce(range(ITEMS), sampler=sampler()),
    "around another": lambda: Around(AtOnce(range(ITEMS), sampler=sampler())),
    "stream": lambda: Counting(Stream()),
    "torchdata": lambda: torchdata_loader(range(ITEMS)),
    "torchdata shuffled": lambda: torchdata_loader(range(ITEMS), shuffle=True),
    "torchdata own generator": lambda: torchdata_loader(
        range(ITEMS), shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "torchdata stream": lambda: torchdata_loader(Stream()),
    "torchdata workers": lambda: torchdata_loader(range(ITEMS), shuffle=True, num_workers=1),
    "torchdata persistent": lambda: torchdata_loader(
        range(ITEMS), shuffle=True, num_workers=1, persistent_workers=True
    ),
}


def seed_all(seed: int) -> None:
    """Every global generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def take(batches: Iterator[Any], count: int) -> list[list[float]]:
    """Some batches, with draws of the training between any two of them."""
    return [
        [*batch.tolist(), torch.rand(()).item(), random.random(), np.random.random()]
        for batch in itertools.islice(batches, count)
    ]


def failing() -> Iterator[torch.Tensor]:
    """Fails after the draws that follow its first batch."""
    yield torch.zeros(1)
    raise ValueError("in between")


def test_nothing_drawn_puts_back_every_generator() -> None:
    """Also where an error ends it."""
    seed_all(3)
    expected = take(iter([torch.zeros(1)]), 1)
    seed_all(3)
    with pytest.raises(ValueError, match="in between"), preserve_rng():
        take(failing(), 2)
    assert take(iter([torch.zeros(1)]), 1) == expected


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("before", [3, ITEMS, ITEMS + 2])
def test_random_numbers_go_on_with_a_stateful_loader(name: str, before: int) -> None:
    """Within an epoch, at its end, in a later one; and in the epoch that follows."""
    seed_all(5)
    whole = DataPosition(STATEFUL[name]())
    batches = whole.batches()
    take(batches, before)
    saved, rng = stored(whole.state()), rng_state()
    expected = take(batches, 2 * ITEMS)
    seed_all(999)
    resumed = DataPosition(STATEFUL[name]())
    resumed.load(saved)
    resumed.prepare()
    set_rng_state(rng)
    assert take(resumed.batches(), 2 * ITEMS) == expected


@pytest.mark.parametrize("name", [name for name in STATEFUL if name.startswith("torchdata")])
@pytest.mark.parametrize("before", [0, 3, ITEMS, ITEMS + 2])
def test_random_numbers_go_on_in_a_loop_that_iterates_the_loader_itself(
    name: str, before: int
) -> None:
    """torchdata's says whether an epoch is under way.  Its state is asked for once more after the
    resume, as a snapshot does that is taken before the loop is there."""

    def epochs(loader: Any) -> Iterator[Any]:
        return itertools.chain.from_iterable(loader for _ in range(4))

    for asked in (False, True):
        seed_all(5)
        loader = STATEFUL[name]()
        position = DataPosition(loader)
        position.state()
        batches = epochs(loader)
        take(batches, before)
        saved, rng = stored(position.state()), rng_state()
        expected = take(batches, 2 * ITEMS)
        seed_all(999)
        loader = STATEFUL[name]()
        resumed = DataPosition(loader)
        resumed.state()
        resumed.load(saved)
        resumed.prepare()
        set_rng_state(rng)
        if asked:
            resumed.state()
        assert take(epochs(loader), 2 * ITEMS) == expected


def test_a_resume_without_a_loop_starts_no_workers() -> None:
    """The iterator is made when the loop comes."""
    loader = STATEFUL["workers with the first batch"]()
    resumed = DataPosition(loader)
    resumed.load({"epoch": 0, "index": 3, "loader": {"given": 3}})
    made: list[Any] = []
    loader._get_iterator = made.append
    resumed.prepare()
    assert made == []
