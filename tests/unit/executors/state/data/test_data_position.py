"""Resuming in the middle of an epoch gives exactly the batches that would have come."""

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from autockpt.executors.state.data.data_position import DataPosition
from autockpt.executors.state.rng import rng_state, set_rng_state
from autockpt.session.place.script.generators import ScriptGenerators
from autockpt.values.errors import ConfigError
from tests.unit.executors.sharding.jobs import stored

ITEMS = 23
DATA = TensorDataset(torch.arange(ITEMS))


class Augmented(Dataset[torch.Tensor]):
    """Items that draw from the global generator, as augmentation does."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


class Wrapping(DataLoader[Any]):
    """Iterates in a generator, as those do that move batches to a device."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class Shuffling(Sampler[int]):
    """Shuffles as scripts do that bucket by length: by a function, or a generator of its own."""

    def __init__(self, shuffled: Callable[[list[int]], Any], generator: Any = None) -> None:
        self.shuffled, self.drawing = shuffled, generator

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        items = list(range(ITEMS))
        given = [] if self.drawing is None else [self.drawing]
        return iter([int(item) for item in self.shuffled(*given, items)])


def by_python(*args: Any) -> list[int]:
    """By the module's generator or the given one."""
    *own, items = args
    (own[0] if own else random).shuffle(items)
    return list(items)


def by_torch(generator: torch.Generator, items: list[int]) -> Any:
    """By a generator in an attribute with a name of its own."""
    return torch.randperm(len(items), generator=generator).tolist()


class Counting(Sampler[int]):
    """Orders that depend on how many there were."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        own = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(ITEMS, generator=own).tolist())


class InPlace(Sampler[int]):
    """Shuffles the order of the epoch before."""

    def __init__(self, order: Any, shuffled: Callable[[Any], Any]) -> None:
        self.order, self.shuffled = order, shuffled

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        drawn = self.shuffled(self.order)
        self.order = self.order if drawn is None else drawn
        parts = [item if isinstance(item, list | tuple) else [int(item)] for item in self.order]
        return iter([item for part in parts for item in part])


SHUFFLES: dict[str, Callable[[], Sampler[int]]] = {
    "Python": lambda: Shuffling(by_python),
    "numpy": lambda: Shuffling(np.random.permutation),
    "own Python": lambda: Shuffling(by_python, random.Random(3)),
    "own numpy": lambda: Shuffling(np.random.Generator.permutation, np.random.default_rng(3)),
    "own old numpy": lambda: Shuffling(np.random.RandomState.permutation, np.random.RandomState(3)),
    "own torch": lambda: Shuffling(by_torch, seeded()),
    "inner torch": lambda: RandomSampler(DATA, generator=seeded()),
    "an epoch's number": Counting,
    "a list in place": lambda: InPlace(list(range(ITEMS)), random.shuffle),
    "lists in place": lambda: InPlace(
        [[0, 1], (2,), [3, 4, 5], (), [*range(6, ITEMS)]], random.shuffle
    ),
    "an array in place": lambda: InPlace(np.arange(ITEMS), np.random.shuffle),
    "a tensor": lambda: InPlace(torch.arange(ITEMS), lambda o: o[torch.randperm(ITEMS)]),
}


def seeded() -> torch.Generator:
    """A loader's own generator."""
    return torch.Generator().manual_seed(11)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(DATA, batch_size=4),
    "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "short last batch dropped": lambda: DataLoader(DATA, 4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=seeded()),
    "sampler with generator": lambda: DataLoader(
        DATA, 4, sampler=RandomSampler(DATA, generator=seeded())
    ),
    "with replacement": lambda: DataLoader(
        DATA, 4, sampler=RandomSampler(DATA, replacement=True, num_samples=40)
    ),
    "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * ITEMS, 20)),
    "subset": lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(5, 20))),
    "distributed": lambda: DataLoader(
        DATA, 2, sampler=DistributedSampler(DATA, num_replicas=2, rank=1, seed=3)
    ),
    "batch sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, drop_last=False)
    ),
    "no batches": lambda: DataLoader(DATA, batch_size=None, shuffle=True),
    "augmented": lambda: DataLoader(Augmented(), 4, shuffle=True),
    "iterates in a generator": lambda: Wrapping(Augmented(), 4, shuffle=True),
    "batch sampler of a distributed one": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, 2, 1, seed=3), 2, False)
    ),
}


class AtOnce(Sampler[list[int]]):
    """Batches in an order that is drawn as soon as somebody iterates; loaders do it twice."""

    def __init__(self, generator: np.random.Generator | None = None) -> None:
        self.drawing = generator

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        if self.drawing is None:
            order = torch.randperm(20).tolist()
        else:
            order = self.drawing.permutation(20).tolist()
        return iter([order[at : at + 4] for at in range(0, 20, 4)])


def drawn_at_once(generator: np.random.Generator | None, persistent: bool) -> DataLoader[Any]:
    """With a worker."""
    return DataLoader(
        DATA, batch_sampler=AtOnce(generator), num_workers=1, persistent_workers=persistent
    )


WORKERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "workers": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=1),
    "persistent workers": lambda: DataLoader(
        DATA, 4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "drawn at once": lambda: drawn_at_once(None, False),
    "drawn at once by its own": lambda: drawn_at_once(np.random.default_rng(3), False),
    "drawn at once, persistent": lambda: drawn_at_once(None, True),
    "drawn at once by its own, persistent": lambda: drawn_at_once(np.random.default_rng(3), True),
}


def flat(batch: Any) -> list[float]:
    """The items of a batch."""
    tensor = batch[0] if isinstance(batch, list | tuple) else batch
    return [float(x) for x in tensor.reshape(-1)]


def take(batches: Iterator[Any], count: int) -> list[list[float]]:
    """Some batches, with a draw of the training between any two of them."""
    taken = []
    for batch in itertools.islice(batches, count):
        drawn = [torch.rand(()).item(), random.random(), np.random.random()]
        taken.append([*flat(batch), *drawn])
    return taken


def seed_all(seed: int) -> None:
    """Every global generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def run_and_resume(make: Callable[[], Any], before: int, after: int) -> None:
    """A run of before + after batches, and one that is cut and goes on in a new process."""
    seed_all(5)
    whole = DataPosition(make())
    batches = whole.batches()
    take(batches, before)
    saved, rng = stored(whole.state()), rng_state()
    expected = take(batches, after)

    seed_all(999)  # the new process: other generators, a new loader
    resumed = DataPosition(make())
    resumed.load(saved)
    resumed.prepare()
    set_rng_state(rng)
    assert take(resumed.batches(), after) == expected
    assert (resumed.epoch, resumed.index) == (whole.epoch, whole.index)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("before", [0, 1, 3, 5, 6, 8])
def test_the_same_batches_come_after_a_resume(name: str, before: int) -> None:
    """Anywhere in the epoch, at its end and in the next one; and in the epochs that follow."""
    run_and_resume(LOADERS[name], before, 14)


@pytest.mark.parametrize("name", SHUFFLES)
@pytest.mark.parametrize("before", [2, 6, 8])
def test_the_same_batches_come_whoever_shuffles(name: str, before: int) -> None:
    """A sampler of one's own, alone and within a batch sampler: in the first epoch, at its end,
    and in a later one, where a new sampler's generator is not what it was."""
    run_and_resume(lambda: DataLoader(DATA, 4, sampler=SHUFFLES[name]()), before, 14)

    def batches() -> DataLoader[Any]:
        return DataLoader(DATA, batch_sampler=BatchSampler(SHUFFLES[name](), 4, False))

    run_and_resume(batches, before, 14)


def test_what_samplers_of_torch_never_draw_from_is_not_stored() -> None:
    """Each snapshot would pay for it."""
    for make in LOADERS.values():
        position = DataPosition(make())
        next(position.batches())
        assert "others" not in position.state()


class Drawing(Dataset[torch.Tensor]):
    """Draws from a generator of its own, or of an object in it."""

    def __init__(self, place: str) -> None:
        own = np.random.default_rng(7)
        inner: Any = {"own": own, "in a list": [own], "in an object": [Step(own)]}.get(place)
        self.steps = Drawing("in a list") if inner is None else inner

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self.draw()])

    def draw(self) -> float:
        """The next number."""
        one = self.steps[0] if isinstance(self.steps, list) else self.steps
        return float(one.draw() if hasattr(one, "draw") else one.random())


class Step:
    """A transform."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def draw(self) -> float:
        """The next number."""
        return float(self.generator.random())


@pytest.mark.parametrize("place", ["own", "in a list", "in an object", "deeper"])
@pytest.mark.parametrize("before", [0, 2, 6, 8])
def test_a_data_set_draws_on(place: str, before: int) -> None:
    """From its own generator, in the process of the training."""
    run_and_resume(lambda: DataLoader(Drawing(place), 4, shuffle=True), before, 14)


def test_a_data_set_draws_a_batch_that_was_given_back_again() -> None:
    """As it had before."""
    seed_all(5)
    whole = DataPosition(DataLoader(Drawing("own"), 4))
    whole.next()
    expected = flat(whole.next())
    assert whole.give_back()
    saved = stored(whole.state())
    resumed = DataPosition(DataLoader(Drawing("own"), 4))
    resumed.load(saved)
    assert flat(resumed.next()) == expected


class Noisy(Dataset[torch.Tensor]):
    """Each sample draws from a generator that the loader may have too."""

    def __init__(self, generator: torch.Generator) -> None:
        self.noise = generator

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(torch.rand((), generator=self.noise))])


@pytest.mark.parametrize("before", [1, 2, 5, 6])
@pytest.mark.parametrize("is_shared", [False, True])
def test_orders_go_on_behind_a_batch_that_was_given_back(before: int, is_shared: bool) -> None:
    """The order of its epoch was drawn, so a given generator stands behind that."""

    def make() -> DataLoader[Any]:
        given = torch.Generator().manual_seed(3)
        data = Noisy(given if is_shared else torch.Generator().manual_seed(4))
        return DataLoader(data, 4, shuffle=True, generator=given)

    whole, ended, resumed = DataPosition(make()), DataPosition(make()), DataPosition(make())
    expected = [flat(whole.next()) for _ in range(14)][before - 1 :]
    for _ in range(before):
        ended.next()
    assert ended.give_back()
    resumed.load(stored(ended.state()))
    assert [flat(resumed.next()) for _ in expected] == expected


rng = np.random.default_rng(1)
"""Of a loop."""


class SameName(Dataset[float]):
    """Its attribute has the name of a global variable."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(2)

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> float:
        return float(self.rng.normal())


def test_a_variable_with_the_name_of_an_attribute_is_the_loops() -> None:
    """The position keeps the generator of the data set alone."""
    loader = DataLoader(SameName(), 4)
    position = DataPosition(loader)
    assert [id(one) for one in position.kept_generators()] == [id(loader.dataset.rng)]  # type: ignore[attr-defined]
    assert list(position.state()["drawing"]) == ["dataset.rng"]


OUTSIDE = torch.Generator()
"""As a script has one beside its classes."""


class NamesOutside(Noisy):
    """Draws from a global variable that a part of it has as well."""

    def __init__(self) -> None:
        self.part = Noisy(OUTSIDE)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.part[index] + torch.rand((), generator=OUTSIDE)


class OrdersOutside(Sampler[int]):
    """Its order is drawn from the global variable."""

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(ITEMS, generator=OUTSIDE).tolist()


@pytest.mark.parametrize("sampler", [None, OrdersOutside()])
@pytest.mark.parametrize("data", [NamesOutside, lambda: Noisy(OUTSIDE)])
def test_a_position_with_names_of_attributes_alone_is_read(
    data: Callable[[], Any], sampler: Any
) -> None:
    """As positions were before variables of methods counted."""

    def make() -> DataPosition:
        return DataPosition(DataLoader(data(), 4, sampler=sampler))

    OUTSIDE.manual_seed(5)
    written = make()
    written.next()
    saved, state = written.state(), OUTSIDE.get_state()
    saved["drawing"] = {n: one for n, one in saved["drawing"].items() if not n.endswith("()")}
    name = "dataset.part.noise" if data is NamesOutside else "dataset.noise"
    assert list(saved["drawing"]) == [name]
    OUTSIDE.manual_seed(6)
    make().load(stored(saved))
    assert torch.equal(OUTSIDE.get_state(), state)


def test_a_variable_that_the_checkpoint_has_as_the_scripts_is_put_back() -> None:
    """An older position lacks it; in the next checkpoint both have it, and nothing is missing."""

    def noisy(rows: list[Any]) -> torch.Tensor:
        return torch.stack(rows) + torch.rand((), generator=OUTSIDE)

    def resumed(position: dict[str, Any], script: dict[str, Any]) -> tuple[Any, Any]:
        OUTSIDE.manual_seed(6)
        place, generators = (
            DataPosition(DataLoader(DATA, 4, collate_fn=noisy)),
            ScriptGenerators(said.append),
        )
        place.load(position)
        generators.expect(script)
        outside = OUTSIDE
        assert outside is OUTSIDE
        generators.look(sys._getframe(), {}, place.kept_generators(resumed=True))
        generators.begin()
        return place, generators

    said: list[str] = []
    OUTSIDE.manual_seed(5)
    state = OUTSIDE.get_state()
    written = DataPosition(DataLoader(DATA, 4, collate_fn=noisy)).state()
    del written["drawing"]
    place, generators = resumed(written, {"resumed.outside": state})
    assert torch.equal(OUTSIDE.get_state(), state)
    both = generators.states()
    assert "resumed.outside" in both
    _, generators = resumed(place.state(), {"resumed.outside": both["resumed.outside"]})
    assert torch.equal(OUTSIDE.get_state(), state)
    assert "resumed.outside" not in generators.states()
    assert not said


def test_a_data_set_without_the_generator_is_refused() -> None:
    """By the name of it."""
    saved = DataPosition(DataLoader(Drawing("own"), 4)).state()
    with pytest.raises(ConfigError, match=r"the generator dataset\.steps"):
        DataPosition(DataLoader(DATA, 4)).load(saved)


def test_what_a_sampler_was_built_with_is_the_scripts() -> None:
    """Only what iterating has changed goes back: a restart may ask for something else."""
    seed_all(5)
    position = DataPosition(DataLoader(DATA, 4, sampler=InPlace(list(range(ITEMS)), list)))
    take(position.batches(), 8)
    assert "values" not in position.state()["others"]


@pytest.mark.parametrize("name", ["Python", "own numpy"])
def test_a_position_from_before_it_had_other_generators_is_read(name: str) -> None:
    """The first epoch's order, as it was then: what the script seeded gives it."""
    seed_all(5)
    whole = DataPosition(DataLoader(DATA, 4, sampler=SHUFFLES[name]()))
    batches = whole.batches()
    take(batches, 2)
    saved, rng = whole.state(), rng_state()
    del saved["others"]
    saved.pop("drawing", None)
    expected = take(batches, 3)
    seed_all(5)
    resumed = DataPosition(DataLoader(DATA, 4, sampler=SHUFFLES[name]()))
    resumed.load(saved)
    resumed.prepare()
    set_rng_state(rng)
    assert take(resumed.batches(), 3) == expected
    assert "others" in resumed.state()


@pytest.mark.parametrize("name", WORKERS)
@pytest.mark.parametrize("before", [2, 6])
def test_workers_give_the_same_batches_after_a_resume(name: str, before: int) -> None:
    """Prefetching and seeds of workers are repeated as well."""
    run_and_resume(WORKERS[name], before, 6)


@pytest.mark.parametrize("name", ["shuffled", "own generator", "weighted", "subset", "no batches"])
def test_a_first_batch_that_was_given_back_comes_again(name: str) -> None:
    """The epoch had begun and its order was drawn, though nothing of it counts."""
    seed_all(5)
    whole = DataPosition(LOADERS[name]())
    batches = whole.batches()
    while whole.epoch == 0:
        next(batches)
    assert whole.index == 1
    assert whole.give_back()
    saved, rng = stored(whole.state()), rng_state()
    expected = take(batches, 3)
    seed_all(999)
    resumed = DataPosition(LOADERS[name]())
    resumed.load(saved)
    resumed.prepare()
    set_rng_state(rng)
    again = resumed.batches()
    next(again)
    assert take(again, 3) == expected


def test_augmentation_in_workers_draws_anew_until_the_epoch_ends() -> None:
    """Skipping by index does not repeat what workers drew for skipped items: the items are right,
    their augmentation is another one, and from the next epoch on everything is equal again."""

    def make() -> DataLoader[Any]:
        return DataLoader(Augmented(), 4, shuffle=True, num_workers=2)

    torch.manual_seed(5)
    whole = DataPosition(make())
    batches = whole.batches()
    take(batches, 2)
    saved, rng = whole.state(), rng_state()
    expected = take(batches, 7)
    resumed = DataPosition(make())
    resumed.load(saved)
    resumed.prepare()
    set_rng_state(rng)
    got = take(resumed.batches(), 7)
    assert [batch[:-3:2] for batch in got] == [batch[:-3:2] for batch in expected]
    assert got[4:] == expected[4:]


def test_nothing_is_loaded_to_be_skipped() -> None:
    """Skipping is by index."""

    class Counting(Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.read: list[int] = []

        def __len__(self) -> int:
            return ITEMS

        def __getitem__(self, index: int) -> torch.Tensor:
            self.read.append(index)
            return torch.tensor(index)

    first = DataPosition(DataLoader(Counting(), 4))
    take(first.batches(), 4)
    data = Counting()
    second = DataPosition(DataLoader(data, 4))
    second.load(first.state())
    second.prepare()
    take(second.batches(), 1)
    assert data.read == [16, 17, 18, 19]


def test_the_sampler_is_told_the_epoch_by_nobody_else() -> None:
    """DistributedSampler repeats its order unless somebody calls set_epoch: each epoch differs."""
    position = DataPosition(LOADERS["distributed"]())
    batches = position.batches()
    first, second = take(batches, 6), take(batches, 6)
    assert [b[:-3] for b in first] != [b[:-3] for b in second]
    assert position.loader.sampler.epoch == position.epoch == 1


class Stateful:
    """A loader that says itself where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 7:
            self.at += 1
            yield torch.tensor([float(self.at)])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("before", [0, 3, 7, 9])
def test_a_stateful_loader_is_asked(before: int) -> None:
    """Its own position is what counts."""
    run_and_resume(Stateful, before, 10)


class Streamed(IterableDataset[int]):
    """As Hugging Face's: a buffer that its state lacks, and a state that each later pass takes."""

    def __init__(self) -> None:
        self._at, self._from = 0, 0

    def __iter__(self) -> Iterator[int]:
        rng, held, self._at = np.random.default_rng(7), [], self._from
        while self._at < ITEMS:
            held.append(self._at)
            self._at += 1
            if len(held) == 6:
                yield held.pop(int(rng.integers(6)))
        yield from held

    def state_dict(self) -> dict[str, Any]:
        """The place of the source."""
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Passes begin there."""
        self._from = state["at"]


Streamed.__module__ = "datasets.iterable_dataset"


def _streamed_torchdata() -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(Streamed(), batch_size=3)


STREAMED: dict[str, Callable[[], Any]] = {
    "plain": lambda: DataLoader(Streamed(), batch_size=3),
    "workers": lambda: DataLoader(Streamed(), batch_size=3, num_workers=2),
    "persistent": lambda: DataLoader(
        Streamed(), batch_size=3, num_workers=1, persistent_workers=True
    ),
    "torchdata": _streamed_torchdata,
}


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("before", [0, 3, 7, 8, 11])
def test_a_streamed_data_set_is_read_again(name: str, before: int) -> None:
    """Also a pass behind the resumed one is whole, and the random numbers go on."""
    make = STREAMED[name]
    whole = stream(make(), 20)
    position = DataPosition(make())
    assert position.is_read_again
    batches = position.batches()
    for _ in range(before):
        next(batches)
    saved = stored(position.state())
    torch.manual_seed(99)
    resumed = DataPosition(make())
    resumed.load(saved)
    state = torch.get_rng_state()
    rest = [resumed.next().tolist()]
    assert before in (0, 8) or torch.equal(state, torch.get_rng_state())  # else an epoch begins
    rest += [resumed.next().tolist() for _ in range(19 - before)]
    assert rest == whole[before:]


def stream(loader: Any, count: int) -> list[list[int]]:
    """Batches of a run that nothing disturbs."""
    batches = DataPosition(loader).batches()
    return [next(batches).tolist() for _ in range(count)]


def test_another_kind_of_loader_is_refused() -> None:
    """Both ways; nothing is guessed."""
    plain, stateful = DataPosition(DataLoader(DATA)), DataPosition(Stateful())
    with pytest.raises(ConfigError, match="made with another kind of loader"):
        plain.load(stateful.state())
    with pytest.raises(ConfigError, match="made with another kind of loader"):
        stateful.load(plain.state())


@pytest.mark.parametrize("name", ["in order", "shuffled", "weighted", "subset", "distributed"])
def test_another_batch_size_goes_on_after_the_same_samples(name: str) -> None:
    """Samples are counted, in the order in which they were drawn."""

    def make(batch_size: int) -> DataLoader[Any]:
        return DataLoader(DATA, batch_size, sampler=LOADERS[name]().sampler)

    torch.manual_seed(5)
    whole = DataPosition(make(3))
    batches = whole.batches()
    take(batches, 2)
    saved = whole.state()
    first_epoch = itertools.takewhile(lambda _: whole.epoch == 0, batches)
    rest = [item for batch in first_epoch for item in flat(batch)]
    torch.manual_seed(999)
    resumed = DataPosition(make(4))
    resumed.load(saved)
    resumed.prepare()
    got = []
    for batch in resumed.batches():
        if resumed.epoch:
            break
        assert len(flat(batch)) <= 4
        got += flat(batch)
    assert got == rest


@pytest.mark.parametrize("name", SHUFFLES)
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)])
def test_another_batch_size_goes_on_where_the_sampler_is_the_scripts(
    name: str, sizes: tuple[int, int]
) -> None:
    """An order that nobody knows: batches are passed over, by as many samples."""
    seed_all(5)
    whole = DataPosition(DataLoader(DATA, sizes[0], sampler=SHUFFLES[name]()))
    batches = whole.batches()
    take(batches, 2)
    saved = whole.state()
    first_epoch = itertools.takewhile(lambda _: whole.epoch == 0, batches)
    rest = [item for batch in first_epoch for item in flat(batch)]
    seed_all(999)
    resumed = DataPosition(DataLoader(DATA, sizes[1], sampler=SHUFFLES[name]()))
    resumed.load(saved)
    assert resumed.number == 2 * sizes[0] // sizes[1]
    resumed.prepare()
    again = itertools.takewhile(lambda _: resumed.epoch == 0, resumed.batches())
    assert [item for batch in again for item in flat(batch)] == rest


class ByLength(Counting):
    """Its order depends on the size of a batch, as of samplers that group by length."""

    batch_size = 4


@pytest.mark.parametrize(
    ("made", "size", "said"),
    [
        (Counting, 3, "makes batches of 3, and these are no whole number of them. Go on with .* 4"),
        (ByLength, 2, "makes batches of 2, and their order may be another one"),
    ],
)
def test_another_batch_size_is_refused_where_samples_would_be_lost(
    made: type[Sampler[int]], size: int, said: str
) -> None:
    """In front of the first batch; a whole epoch may have any."""
    position = DataPosition(DataLoader(DATA, 4, sampler=made()))
    whole = position.state()
    next(position.batches())
    other = DataPosition(DataLoader(DATA, size, sampler=made()))
    other.load(whole)
    with pytest.raises(ConfigError, match=said):
        other.load(position.state())


def test_another_group_of_a_sampler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order is another one, though batches have the same size."""
    position = DataPosition(DataLoader(DATA, 2, sampler=ByLength()))
    whole = position.state()
    next(position.batches())
    monkeypatch.setattr(ByLength, "batch_size", 8)
    other = DataPosition(DataLoader(DATA, 2, sampler=ByLength()))
    other.load(whole)
    with pytest.raises(ConfigError, match=r"groups of 4 samples, .* makes groups of 8"):
        other.load(position.state())


def test_another_data_set_is_refused_where_the_sampler_is_the_scripts() -> None:
    """Its order would be another one."""
    position = DataPosition(DataLoader(DATA, 4, sampler=Counting()))
    next(position.batches())
    shorter = DataPosition(DataLoader(TensorDataset(torch.arange(20)), 4, sampler=Counting()))
    with pytest.raises(ConfigError, match="the epoch had 23 samples, this loader's has 20"):
        shorter.load(position.state())


def test_a_data_set_of_another_length_is_refused() -> None:
    """Nobody knows which of its samples were taken."""
    position = DataPosition(LOADERS["shuffled"]())
    next(position.batches())
    shorter = DataPosition(DataLoader(TensorDataset(torch.arange(20)), 4, shuffle=True))
    with pytest.raises(ConfigError, match="the epoch had 23 samples, this loader's has 20"):
        shorter.load(position.state())


def test_another_number_of_generators_is_refused() -> None:
    """Their states would go to the wrong ones."""
    position = DataPosition(DataLoader(DATA, 4))
    next(position.batches())
    with pytest.raises(ConfigError, match="had 0 generators of its own, this one has 1"):
        DataPosition(DataLoader(DATA, 4, generator=seeded())).load(position.state())


def test_a_sampler_without_the_generator_that_shuffled_is_refused() -> None:
    """Its order would be another one."""
    position = DataPosition(DataLoader(DATA, 4, sampler=SHUFFLES["own numpy"]()))
    next(position.batches())
    with pytest.raises(ConfigError, match=r"from the generator sampler\.drawing, .* \(it has none"):
        DataPosition(DataLoader(DATA, 4, sampler=SHUFFLES["numpy"]())).load(position.state())


@pytest.mark.parametrize("name", ["shuffled", "distributed"])
def test_a_position_from_before_it_said_how_samples_are_shared_is_read(name: str) -> None:
    """Older checkpoints resume on as many ranks, and from then on they say it."""
    torch.manual_seed(5)
    whole = DataPosition(LOADERS[name]())
    batches = whole.batches()
    take(batches, 2)
    saved = {k: v for k, v in whole.state().items() if k not in ("start", "order", "share")}
    rng = rng_state()
    expected = take(batches, 9)
    resumed = DataPosition(LOADERS[name]())
    resumed.load(saved)
    resumed.prepare()
    assert {"start", "order", "share"} <= set(resumed.state())
    set_rng_state(rng)
    assert take(resumed.batches(), 9) == expected


def test_a_loader_that_iterates_in_its_own_way_is_refused_at_attach() -> None:
    """It would start the epoch over after a resume."""

    class Own(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([torch.zeros(1)] * 3)

    with pytest.raises(ConfigError, match=r"a .*Own does not iterate as DataLoader does"):
        DataPosition(Own(DATA))


class Endless(IterableDataset[int]):
    """A stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2, 3], "a list can neither say where it is"),
        (iter([1]), "a list_iterator can neither"),
        (DataLoader(Endless()), "over an IterableDataset cannot be skipped by index"),
        (DataLoader(DATA, num_workers=1, in_order=False), "gives batches as they come"),
    ],
    ids=["list", "iterator", "stream", "out of order"],
)
def test_what_cannot_be_resumed_is_refused_at_attach(loader: Any, message: str) -> None:
    """With what to do instead."""
    with pytest.raises(ConfigError, match=message):
        DataPosition(loader)


def test_an_empty_loader_is_an_error_and_no_endless_loop() -> None:
    """An epoch without a batch."""
    with pytest.raises(ConfigError, match="gave no batch in a whole epoch"):
        next(DataPosition(DataLoader(TensorDataset(torch.zeros(0)))).batches())
