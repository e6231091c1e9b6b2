"""A loader whose loop is another's resumes with the batches and draws that would have come."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    TensorDataset,
)

from autockpt.executors.state.data.epoch_loader import EpochLoader
from autockpt.executors.state.rng import rng_state, set_rng_state
from autockpt.values.errors import ConfigError
from tests.unit.executors.sharding.jobs import stored

ITEMS, EPOCHS = 11, 3


class Drawing(Dataset[torch.Tensor]):
    """Items that draw from the global generator, as augmentation does."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


def plain(**options: Any) -> "DataLoader[Any]":
    """Shuffled, and every sample draws."""
    return DataLoader(Drawing(), batch_size=2, shuffle=True, **options)


def looking_ahead(batches: Iterator[Any], ahead: int) -> Iterator[Any]:
    """Hands a batch out when `ahead` more have been fetched, as accelerate does with one."""
    held: list[Any] = []
    for batch in batches:
        held.append(batch)
        if len(held) > ahead:
            yield held.pop(0)
    yield from held


class Training:
    """Trains by drawing: what it has seen is a list of batches and of random numbers."""

    def __init__(self, loader: Any, ahead: int = 0) -> None:
        self.loader, self.ahead = loader, ahead
        self.seen: list[Any] = []
        self.before = 0
        """Iterations of the process before."""

    def epochs(self, first: int, until: int | None = None, told: Any = None) -> bool:
        """False when it stops behind `until` iterations."""
        for epoch in range(first, EPOCHS):
            if told is not None:
                told(epoch)
            for batch in looking_ahead(iter(self.loader), self.ahead):
                self.seen.append((batch.tolist(), torch.rand(()).item()))
                if self.ahead > 1 and type(self.loader) is EpochLoader:
                    self.loader.trained((self.before + len(self.seen) - 1) % 6 + 1)
                if len(self.seen) == until:
                    return False
        return True


def undisturbed(make: Callable[[], Any], ahead: int = 0, told: Any = None) -> list[Any]:
    """Of the bare loader."""
    torch.manual_seed(3)
    training = Training(make(), ahead)
    training.epochs(0, told=told and (lambda epoch, loader=training.loader: told(loader, epoch)))
    return training.seen


def killed_and_resumed(
    make: Callable[[], Any], until: int, ahead: int = 0, told: Any = None
) -> list[Any]:
    """Stopped behind `until` iterations, and gone on by another process's loader."""
    torch.manual_seed(3)
    own = EpochLoader(make(), ahead=ahead, begin=lambda: None)
    first = Training(own, ahead)
    first.epochs(0, until, told and (lambda epoch: told(own, epoch)))
    state, rng = stored(own.state()), rng_state()
    torch.manual_seed(99)
    begun: list[int] = []

    def begin() -> None:
        begun.append(1)
        set_rng_state(rng)

    again = EpochLoader(make(), ahead=ahead, begin=begin)
    again.load(state)
    second = Training(again, ahead)
    second.before = until
    second.epochs(again.epoch, told=told and (lambda epoch: told(again, epoch)))
    assert begun == [1]
    return first.seen + second.seen


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("until", [1, 4, 5, 6, 7, 11, 12, 17])
def test_each_stop_goes_on_as_undisturbed(until: int, ahead: int) -> None:
    """Mid-epoch, at the last batches of an epoch, and where the next one begins."""
    assert killed_and_resumed(plain, until, ahead) == undisturbed(plain, ahead)


def test_workers_that_persist_go_on() -> None:
    """Worker processes fetch ahead by themselves; sample ids must go on all the same."""

    def make() -> Any:
        data = TensorDataset(torch.arange(ITEMS))
        options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
        return DataLoader(data, 2, shuffle=True, collate_fn=_first, **options)

    assert killed_and_resumed(make, 8, 1) == undisturbed(make, 1)


def _first(rows: list[Any]) -> torch.Tensor:
    return torch.stack([row[0] for row in rows])


def test_a_sampler_is_told_no_epoch_but_the_frameworks() -> None:
    """The framework's numbers shuffle, and an epoch that it never told stays the first."""

    def make() -> Any:
        data = Drawing()
        sampler: Any = DistributedSampler(data, num_replicas=2, rank=1, seed=5)
        return DataLoader(data, batch_size=2, sampler=sampler)

    def told(loader: Any, epoch: int) -> None:
        loader.sampler.set_epoch(7 * epoch)

    assert killed_and_resumed(make, 5, 0, told) == undisturbed(make, 0, told)
    assert killed_and_resumed(make, 5) == undisturbed(make)


class SeedsLate(Sampler[int]):
    """Makes its generator with its first order, and seeds it by epoch (as accelerate's does)."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch)
        yield from torch.randperm(ITEMS, generator=self.generator).tolist()
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """The framework's number."""
        self.epoch = epoch


@pytest.mark.parametrize("until", [4, 6, 9, 12])
def test_a_generator_that_a_sampler_makes_late_goes_on(until: int) -> None:
    """In the second epoch the checkpoint has it, and a new sampler does not yet."""

    def make() -> Any:
        return DataLoader(Drawing(), batch_sampler=BatchSampler(SeedsLate(), 2, drop_last=False))

    def told(loader: Any, epoch: int) -> None:
        loader.batch_sampler.sampler.set_epoch(epoch)

    assert killed_and_resumed(make, until, 1, told) == undisturbed(make, 1, told)


OUTSIDE = torch.Generator()
"""As a script has one beside its classes."""


class DrawsOutside(Sampler[int]):
    """Its order is drawn from a global variable."""

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(ITEMS, generator=OUTSIDE).tolist()


class DrawsInside(Dataset[torch.Tensor]):
    """Each sample draws from a generator of the data set, and from another."""

    def __init__(self, other: torch.Generator) -> None:
        self.own = torch.Generator().manual_seed(7)
        self.other = other

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [torch.rand((), generator=one).item() for one in (self.own, self.other)]
        return torch.tensor([float(index), *drawn])


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("until", [1, 4, 5, 6, 9, 12])
def test_an_order_drawn_from_a_global_variable_goes_on(until: int, ahead: int) -> None:
    """The order of the epoch under way is drawn again from the state of then."""

    def make() -> Any:
        OUTSIDE.manual_seed(5)
        return DataLoader(Drawing(), batch_size=2, sampler=DrawsOutside())

    assert killed_and_resumed(make, until, ahead) == undisturbed(make, ahead)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("until", [1, 4, 5, 6, 9, 12])
def test_generators_of_a_data_set_go_on_behind_a_fetch_ahead(until: int, ahead: int) -> None:
    """A batch that was fetched and not trained is drawn again, from the state in front of it."""

    def make() -> Any:
        other = torch.Generator().manual_seed(9)
        noise = lambda rows: torch.stack(rows) + torch.rand((), generator=other)  # noqa: E731
        return DataLoader(DrawsInside(other), batch_size=2, shuffle=True, collate_fn=noise)

    assert killed_and_resumed(make, until, ahead) == undisturbed(make, ahead)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("until", [1, 4, 6, 9, 12])
@pytest.mark.parametrize("is_given", [False, True])
def test_one_generator_of_an_order_and_of_samples_goes_on(
    until: int, ahead: int, is_given: bool
) -> None:
    """The order of the epoch comes from its begin, the next sample from the boundary."""

    def make() -> Any:
        OUTSIDE.manual_seed(5)
        data = DrawsInside(OUTSIDE)
        if is_given:
            return DataLoader(data, batch_size=2, shuffle=True, generator=OUTSIDE)
        return DataLoader(data, batch_size=2, sampler=DrawsOutside())

    assert killed_and_resumed(make, until, ahead) == undisturbed(make, ahead)


def test_more_than_one_ahead_needs_to_be_told() -> None:
    """How many batches are left when the loader has ended is the framework's knowledge."""
    loader = EpochLoader(plain(), ahead=2, begin=lambda: None)
    with pytest.raises(ConfigError, match=r"loader\.trained"):
        loader.state()


def test_a_pass_left_early_is_an_epoch() -> None:
    """Frameworks that limit an epoch leave the loader by break."""
    loader = EpochLoader(plain(), begin=lambda: None)
    next(iter(loader))
    assert loader.epoch == 0
    next(iter(loader))
    assert loader.epoch == 1


def test_it_looks_like_its_loader() -> None:
    """Frameworks ask for its kind, its length and its attributes."""
    loader = EpochLoader(plain(), begin=lambda: None)
    assert isinstance(loader, DataLoader)
    assert (len(loader), loader.batch_size) == (6, 2)


def test_a_shorter_data_set_is_refused_in_words() -> None:
    """The fetches of the checkpoint must exist."""
    own = EpochLoader(plain(), ahead=1, begin=lambda: None)
    for number, _ in enumerate(looking_ahead(iter(own), 1)):
        if number == 4:
            break
    state = own.state()
    state["index"] = 6
    again = EpochLoader(plain(), ahead=1, begin=lambda: None)
    again.load(state)
    with pytest.raises(ConfigError, match="the epoch ends after 6 batches"):
        next(iter(again))


def made_early(loader: Any, first: int, *, saved_at: int | None = None, again: bool = False) -> Any:
    """A framework that makes the iterator, draws, and has its boundary in front of each fetch."""
    seen: list[Any] = []
    for epoch in range(first, EPOCHS):
        iterator = iter(loader)
        if not again:
            torch.rand(3)  # hooks of the epoch's begin, which a resumed epoch does not call
        while True:
            if again:
                set_rng_state(BOUNDARY["rng"])
                again = False
            if len(seen) == saved_at:
                BOUNDARY.update(rng=rng_state(), state=stored(loader.state()), epoch=epoch)
            batch = next(iterator, None)
            if batch is None:
                break
            seen.append((batch.tolist(), torch.rand(()).item()))
    return seen


BOUNDARY: dict[str, Any] = {}


@pytest.mark.parametrize("again", [6, 7, 9])
@pytest.mark.parametrize("until", [0, 1, 5, 6, 8, 12])
def test_draws_between_iterator_and_first_batch_are_known(until: int, again: int) -> None:
    """Also where the checkpoint is made between the two: the order is not drawn yet."""
    torch.manual_seed(3)
    undisturbed = made_early(plain(), 0)
    torch.manual_seed(3)
    made_early(EpochLoader(plain(), begin=lambda: None), 0, saved_at=until)
    for number in range(2):  # the second checkpoint is made by a process that was resumed
        torch.manual_seed(99)
        loader = EpochLoader(plain(), begin=lambda: None)
        loader.load(BOUNDARY["state"])
        saved_at = again - until if again > until and not number else None
        seen = made_early(loader, BOUNDARY["epoch"], saved_at=saved_at, again=True)
        assert seen == undisturbed[len(undisturbed) - len(seen) :]
        assert len(seen) >= len(undisturbed) - max(until, again)


def test_an_epoch_that_is_over_is_followed_by_a_whole_one() -> None:
    """A framework that stops behind the last batch has asked for none that is not there."""
    torch.manual_seed(3)
    first = EpochLoader(plain(), begin=lambda: None)
    batches = iter(first)
    for _ in range(len(first)):
        next(batches)
    first.end_epoch()
    again = EpochLoader(plain(), begin=lambda: None)
    again.load(stored(first.state()))
    assert again.epoch == 1
    assert len(list(again)) == len(first)


def counted(loader: Any, first: int, until: int) -> list[Any]:
    """Batches `first` to `until`, as Ignite asks: it finds out late that a pass is over.

    The sampler has been told the next epoch by then.
    """
    seen: list[Any] = []
    length = len(loader)
    loader.sampler.set_epoch(first // length + 1)
    batches = iter(loader)
    for number in range(first, until):
        if number and not number % length:
            loader.sampler.set_epoch(number // length + 1)
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        seen.append(batch.tolist())
    if until and not until % length:
        loader.sampler.set_epoch(until // length + 1)
    return seen


@pytest.mark.parametrize("until", [1, 2, 3, 4, 6, 7])
def test_a_sampler_told_the_next_epoch_early_goes_on(until: int) -> None:
    """At the edge of an epoch the old one is still under way for the loader."""

    def make() -> Any:
        data = TensorDataset(torch.arange(ITEMS))
        sampler: Any = DistributedSampler(data, num_replicas=2, rank=1, seed=5)
        return DataLoader(data, 2, sampler=sampler, collate_fn=_first)

    first = EpochLoader(make(), begin=lambda: None)
    seen = counted(first, 0, until)
    again = EpochLoader(make(), begin=lambda: None)
    again.load(stored(first.state()))
    assert seen + counted(again, until, 9) == counted(make(), 0, 9)


@pytest.mark.parametrize("until", [0, 3])
def test_a_pass_that_trains_nothing_is_no_epoch(until: int) -> None:
    """A look at a batch, an evaluation within a pass and one behind it; a resumed epoch waits."""
    steps: list[Any] = []

    def evaluate(loader: Any) -> None:
        assert len(list(loader)) == len(loader)

    def train(loader: EpochLoader, stop: int | None = None) -> None:
        for batch in loader:
            steps.append((loader.epoch, batch[:, 0].tolist()))
            if len(steps) == stop:
                return
            evaluate(loader)

    loader = EpochLoader(plain(), begin=lambda: None, mark=lambda: len(steps))
    next(iter(loader))
    assert loader.epoch == 0
    if until:
        train(loader, until)
        again = EpochLoader(plain(), begin=lambda: None, mark=lambda: len(steps))
        again.load(stored(loader.state()))
        loader = again
        peeked = next(iter(loader))[:, 0].tolist()
        assert loader.first_batch == until
        train(loader)
        assert steps[until][1] == peeked
    else:
        train(loader)
    assert [epoch for epoch, _ in steps] == [0] * len(loader)
    assert sorted(one for _, samples in steps for one in samples) == list(range(ITEMS))
    evaluate(loader)
    assert loader.epoch == 1
