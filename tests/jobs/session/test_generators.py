"""Random generators that the script holds itself go on where they were."""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from autockpt.executors.state.data.shuffle_rng import generator_state
from autockpt.executors.state.rng import python_state
from autockpt.session.boundaries.loop_ahead import NAMED_LOOPS, is_loop_ahead
from autockpt.session.place.script.generators import ScriptGenerators
from tests.support import trainings

TOTAL, LEFT = 8, 5


class Holder:
    """An object of a script that draws."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {
            "first": [random.Random(3)],
            "again": np.random.RandomState(5),
        }


@pytest.fixture
def begin(attach: Callable[..., Any], new_run: Callable[..., str]) -> Callable[..., Any]:
    """Begins, or goes on with, a training with a checkpoint after every step."""

    def make(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, name: str, **others: Any
    ) -> Any:
        run_dir = trainings.prepare(new_run(name), trainings.plan(memory=1, disk=1))
        return attach(model=model, optimizer=optimizer, run_dir=run_dir, **others)

    return make


def drawn(begin: Callable[..., Any], name: str, stop: int) -> Iterator[list[float]]:
    """What the loop of a script draws in each step up to `stop`."""
    bits, at_first = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = begin(model, optimizer, name)
    first = ckpt.step_count
    model(torch.ones(1, 1))  # a trial: the loop that follows is the training
    data = torch.rand(100, generator=at_first)  # behind attach: as the script built the generator
    numbers, holder = np.random.default_rng(4), Holder()
    for step in ckpt.steps(TOTAL):
        at = int(torch.randint(100, (), generator=bits))
        yield [
            float(data[at]), float(numbers.random()), holder.parts["first"][0].gauss(0, 1),
            float(holder.parts["again"].normal()), float(torch.rand((), generator=at_first)),
        ]  # fmt: skip
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert step == first or ckpt._client.wait_until(lambda: bool(ckpt._client.slots), 60)
        if step + 1 == stop < TOTAL:
            ckpt.step()
            break
    if stop < TOTAL:
        assert ckpt.wait_durable(60)
        ckpt.close(final_checkpoint=False)


def test_generators_of_the_script_go_on_after_a_restart(begin: Callable[..., Any]) -> None:
    """Variables and attributes, of torch, Python and numpy, built before attach and behind it."""
    whole = list(drawn(begin, "whole", TOTAL))
    begun = list(drawn(begin, "run", LEFT))
    rest = list(drawn(begin, "run", TOTAL))
    assert len(begun) == LEFT
    assert 0 < len(rest) < TOTAL  # the last step's checkpoint may have found no free slot
    assert begun[: TOTAL - len(rest)] + rest == whole


class Counter:
    """The place of a loop, kept by the script."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As torch's."""
        self.count = state["count"]


def drawn_ahead(begin: Callable[..., Any], name: str, stop: int, keeps: str) -> Iterator[float]:
    """What a loop of the script's own draws in front of the forward of each step up to `stop`."""
    bits = torch.Generator().manual_seed(1)
    model, counter = torch.nn.Linear(1, 1), Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = begin(model, optimizer, name, **({"counter": counter} if keeps == "object" else {}))
    batches: Any = range(ckpt.step_count if keeps == "count" else counter.count, TOTAL)
    if keeps == "loader":
        loader = ckpt.loader(DataLoader(torch.ones(TOTAL, 1)))  # type: ignore[arg-type]
        batches = loader if loader.epoch == 0 else ()
    for _ in batches:
        yield float(torch.rand((), generator=bits))
        if keeps == "count":
            assert ckpt.step_count < stop
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        counter.count += 1
        ckpt.step()
        assert ckpt._client.wait_until(lambda: bool(ckpt._client.slots), 60)
        if ckpt._rank.step == stop < TOTAL:
            break
    if stop < TOTAL:
        assert ckpt.wait_durable(60)
        ckpt.close(final_checkpoint=False)


@pytest.mark.parametrize("keeps", ["object", "loader", "count"])
def test_the_first_draw_of_a_resumed_loop_has_its_state(
    begin: Callable[..., Any], keeps: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It comes in front of the first forward, from a generator that was built before attach."""
    whole = list(drawn_ahead(begin, "whole", TOTAL, keeps))
    begun = list(drawn_ahead(begin, "run", LEFT, keeps))
    rest = list(drawn_ahead(begin, "run", TOTAL, keeps))
    assert len(begun) == LEFT
    assert 0 < len(rest) < TOTAL
    assert begun[: TOTAL - len(rest)] + rest == whole
    assert "random generator" not in capfd.readouterr().err


def test_a_loop_is_seen_ahead_of_a_call_that_has_not_returned() -> None:
    """The variable of the result, and one of a function that passes it on, tells."""
    seen: list[bool] = []

    def attach() -> Any:
        seen.append(is_loop_ahead(None, sys._getframe(1), NAMED_LOOPS, in_attach=True))
        return None

    def passes_on() -> Any:
        return attach()

    def enters(passes: Callable[[], Any]) -> None:
        it = passes()
        if len(seen) > 10:
            it.steps(1)

    def asks(passes: Callable[[], Any]) -> None:
        it = passes()
        other: Any = seen
        if len(seen) > 10:
            other.steps(it)

    for script in (enters, asks):
        for passes in (attach, passes_on):
            script(passes)
    assert seen == [True, True, False, False]


def test_a_draw_is_seen_and_a_generator_that_is_missing_is_said() -> None:
    """Of one that others keep, nothing is saved."""
    mine, theirs = [np.random.RandomState(1)], torch.Generator()
    said: list[str] = []
    it = ScriptGenerators(said.append)
    it.expect({"test.gone": mine[0].get_state(legacy=False)})

    def test() -> None:
        kept = {"a": mine[0], "b": theirs, "of the system": random.SystemRandom()}
        assert kept
        it.look(sys._getframe(), {}, [theirs])
        it.begin()

    test()
    (missing,) = said
    assert "test.gone" in missing
    assert [name for name in it.states() if name.startswith("test.")] == ["test.kept.a"]
    before = it.mark()
    assert it.mark() == before
    mine[0].normal()
    assert it.mark() != before


def test_generators_of_one_path_are_all_saved() -> None:
    """A method that runs in one of the same name; each keeps its name in a later search."""
    it, inner, outer = ScriptGenerators(print), random.Random(1), random.Random(2)

    def run(numbers: random.Random, deeper: int) -> None:
        if deeper:
            run(inner, deeper - 1)
        assert {numbers}
        it.look(sys._getframe(), {}, [])

    def names() -> dict[str, Any]:
        states = it.states()
        return {name: states[name] for name in states if name.startswith("run.")}

    run(outer, 1)
    found = names()
    assert list(found) == ["run.numbers", "run.numbers'"]
    for name, one in (("run.numbers", inner), ("run.numbers'", outer)):
        assert np.array_equal(found[name][1], python_state(one)[1])


class Broken(random.Random):
    """Its state cannot be read."""

    breaks = True

    def getstate(self) -> Any:
        """As of Python's."""
        if self.breaks:
            raise NotImplementedError("no state")
        return super().getstate()


def test_a_generator_that_cannot_be_read_is_left_out_and_said_once() -> None:
    """From the beginning on, or later; the others are saved."""
    said: list[str] = []
    it, never, later, fine = ScriptGenerators(said.append), Broken(), Broken(), random.Random()
    later.breaks = False

    def test() -> list[str]:
        assert {never, later, fine}
        it.look(sys._getframe(), {}, [])
        it.mark()
        return [name for name in it.states() if name.startswith("test.")]

    assert test() == ["test.fine", "test.later"]
    later.breaks = True
    assert test() == test() == ["test.fine"]
    assert ["no state" in text for text in said] == [True, True]
    assert "test.never" in said[0]
    assert "test.later" in said[1]


@pytest.mark.parametrize(
    "other", [np.random.Generator(np.random.Philox(1)), torch.Generator(), random.Random(1)]
)
def test_a_state_that_does_not_fit_is_said(other: Any) -> None:
    """A generator of that name, and of another kind."""
    said: list[str] = []
    it, numbers = ScriptGenerators(said.append), np.random.default_rng(1)
    before = repr(numbers.bit_generator.state)
    it.expect({"test.kept": generator_state(other)})

    def test(kept: Any) -> None:
        it.look(sys._getframe(), {}, [])
        it.begin()

    test(numbers)
    (unfit,) = said
    assert "random generator test.kept. Where" in unfit
    assert "none of that name and kind" in unfit
    assert repr(numbers.bit_generator.state) == before


def test_a_generator_that_is_found_late_is_said_and_others_are_left_alone() -> None:
    """A batch was asked for: those that had their states go on from there."""
    said: list[str] = []
    it, early = ScriptGenerators(said.append), random.Random(1)
    state = python_state(random.Random(3))
    it.expect({"test.first": state, "test.second": state})

    def test(first: Any, second: Any) -> None:
        it.look(sys._getframe(), {}, [])

    test(early, None)
    numbers = [early.random()]
    it.has_drawn, late = True, random.Random(2)
    test(early, late)
    (text,) = said
    assert "random generator test.second got the state" in text
    numbers += [early.random(), late.random()]
    saved = random.Random(3)
    assert numbers == [saved.random(), saved.random(), random.Random(3).random()]
