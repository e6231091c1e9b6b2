"""Random generators that the script holds itself go on where they were."""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from autockpt.session.place.script_generators import ScriptGenerators
from tests.support import trainings

TOTAL, LEFT = 8, 5


class Holder:
    """An object of a script that draws."""

    def __init__(self) -> None:
        self.parts = {"first": [random.Random(3)], "again": np.random.RandomState(5)}


@pytest.fixture
def begin(attach: Callable[..., Any], new_run: Callable[..., str]) -> Callable[..., Any]:
    """Begins, or goes on with, a training with a checkpoint after every step."""

    def make(model: torch.nn.Module, optimizer: torch.optim.Optimizer, name: str) -> Any:
        run_dir = trainings.prepare(new_run(name), trainings.plan(memory=1, disk=1))
        return attach(model=model, optimizer=optimizer, run_dir=run_dir)

    return make


def drawn(begin: Callable[..., Any], name: str, stop: int) -> Iterator[list[float]]:
    """What the loop of a script draws in each step up to `stop`."""
    bits, at_first = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = begin(model, optimizer, name)
    first = ckpt.step_count
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
    assert len(rest) == TOTAL - LEFT
    assert begun + rest == whole


def test_a_draw_is_seen_and_a_generator_that_is_missing_is_said() -> None:
    """Of one that others keep, nothing is saved."""
    mine, theirs = [np.random.RandomState(1)], torch.Generator()
    it = ScriptGenerators()
    it.expect({"test.gone": mine[0].get_state(legacy=False)})

    def test() -> list[str]:
        kept = {"a": mine[0], "b": theirs, "of the system": random.SystemRandom()}
        assert kept
        it.look(sys._getframe(), {}, [theirs])
        return it.begin()

    (said,) = test()
    assert "test.gone" in said
    assert [name for name in it.states() if name.startswith("test.")] == ["test.kept.a"]
    before = it.mark()
    assert it.mark() == before
    mine[0].normal()
    assert it.mark() != before
