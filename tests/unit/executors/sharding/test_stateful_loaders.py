"""Loaders that know their place, on other ranks: they reshard themselves or are shared anew."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from autockpt.executors.state.data.data_position import DataPosition
from autockpt.values.errors import ConfigError
from examples.gpt.train import TextLoader
from tests.unit.executors.sharding.jobs import Job


class Counted:
    """Gives 0, 1, 2, ... in the order of all ranks; its state is the rank's own count."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.base, self.at = rank, world, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            value = self.base + self.at * self.world + self.rank
            self.at += 1
            yield torch.tensor([value])

    def state_dict(self) -> dict[str, int]:
        return {"base": self.base, "at": self.at, "world": self.world}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.base, self.at = state["base"], state["at"]


class Resharded(Counted):
    """The same with the method that makes it elastic."""

    def reshard_state(self, states: Sequence[Any], rank: int, world: int) -> dict[str, int]:
        assert (rank, world) == (self.rank, self.world)
        assert len(states) == states[0]["world"]
        return {"base": states[0]["base"] + sum(state["at"] for state in states), "at": 0}


def test_a_stateful_loader_reshards_itself() -> None:
    """It gets the states of all old ranks and its own place among the new."""
    first = Job(Resharded, 2)
    for _ in range(3):
        first.step()
    second = Job(Resharded, 3, first.save())
    second.step()
    assert first.seen[0] + second.seen[0] == Counter(range(9))


def test_a_stateful_loader_without_the_method_is_told_what_to_add() -> None:
    """And it resumes on as many ranks as before."""
    first = Job(Counted, 2)
    first.step()
    with pytest.raises(ConfigError, match="can go on with a Counted if it has reshard_state"):
        Job(Counted, 3, first.save())
    same = DataPosition(Counted(1, 2))
    same.load(first.save()[1])
    assert next(same.batches()).tolist() == [3]


class FirstBytes(TextLoader):
    """The example's loader, over a text in which no byte is twice."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(torch.arange(201, dtype=torch.uint8), 1, 3, 0, rank, world)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (batch[:, 0] for batch in super().__iter__())


def test_the_examples_loader_goes_on_with_other_ranks() -> None:
    """Windows come once; as in every epoch, what makes no whole step is left out."""
    first = Job(FirstBytes, 2)
    first.step()
    second = Job(FirstBytes, 3, first.save())
    while second.step() < 1:
        pass
    seen = first.seen[0] + second.seen[0]
    assert set(seen.values()) == {1}
    assert seen.total() == 200 - (200 - 6) % 9


class StatefulLoader(DataLoader[int]):
    """A DataLoader with state, of the kind of torchdata's."""

    skip = 0
    given = 0

    def __iter__(self) -> Any:
        self.given, self.skip = self.skip, 0
        for batch in list(super().__iter__())[self.given :]:
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["given"]


def torchdata_loader(*args: Any, **options: Any) -> Any:
    """torchdata's own; the test is skipped where it is not installed."""
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(*args, **options)


@pytest.mark.parametrize(
    ("make_loader", "workers"), [(StatefulLoader, 0), (torchdata_loader, 0), (torchdata_loader, 2)]
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_stateful_dataloader_is_shared_anew_by_its_sampler(
    make_loader: Callable[..., Any], workers: int
) -> None:
    """Its own state counts batches of another share; the sampler knows the order.  Two changes in
    one epoch, a resume on the same ranks between them, and a plain epoch after."""

    def make(rank: int, world: int) -> Any:
        sampler = DistributedSampler(range(40), world, rank, seed=2)
        return make_loader(range(40), batch_size=2, sampler=sampler, num_workers=workers)

    first = Job(make, 2)
    first.step()
    second = Job(make, 3, first.save())
    second.step()
    saved = second.save()
    again = Job(make, 3)
    for position, state in zip(again.positions, saved, strict=True):
        position.load(state)
        position.prepare()
    again.step()
    third = Job(make, 2, again.save())
    while third.step() < 2:
        pass
    seen = first.seen[0] + second.seen[0] + again.seen[0] + third.seen[0]
    assert seen == Counter(range(40))
    assert third.seen[1] == Counter(range(40))
    resumed = DataPosition(make(0, 2))
    resumed.load(third.save()[0])  # a plain epoch: the loader's own state again
    assert "loader" in resumed.state()
    expected = next(third._batches[0]).tolist()
    assert next(resumed.batches()).tolist() == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_stateful_dataloader_for_all_ranks_keeps_its_own_state() -> None:
    """Every rank sees all data, in the order of the loader's own generator."""

    def make(rank: int, world: int) -> Any:
        generator = torch.Generator().manual_seed(4)
        return torchdata_loader(range(20), batch_size=3, shuffle=True, generator=generator)

    first = Job(make, 2)
    first.step()
    second = Job(make, 3, first.save())
    while second.step() < 1:
        pass
    assert set(second.seen[0].values()) == {3}
    assert set(first.seen[0]) | set(second.seen[0]) == set(range(20))
    assert not set(first.seen[0]) & set(second.seen[0])


def test_an_order_that_only_a_stateful_loader_knows_is_not_counted_on() -> None:
    """Another batch size under its own shuffle: no guess."""

    def make(batch_size: int) -> DataPosition:
        return DataPosition(StatefulLoader(range(20), batch_size, shuffle=True))

    position = make(2)
    next(position.batches())
    with pytest.raises(ConfigError, match="known to the loader alone"):
        make(4).load(position.state())
