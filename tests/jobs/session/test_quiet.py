"""Boundaries with nothing to do are passed quickly, and miss nothing that comes in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autockpt.run_directory import RunDirectory
from autockpt.session.boundaries.boundary import Boundaries
from autockpt.values import telemetry as t
from tests.support import trainings


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of the boundaries that were passed quickly."""
    found: list[int] = []
    passes = Boundaries._pass_quietly

    def noted(boundaries: Boundaries, step: int) -> None:
        found.append(step)
        passes(boundaries, step)

    monkeypatch.setattr(Boundaries, "_pass_quietly", noted)
    return found


class Training:
    """One small net; a checkpoint every tenth step."""

    def __init__(self, attach: Callable[..., Any], run_dir: str) -> None:
        self.run_dir = trainings.prepare(run_dir, trainings.plan(memory=10, disk=10))
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.ckpt = attach(model=self.model, optimizer=self.optimizer, run_dir=self.run_dir)

    def iterate(self, *, steps: bool = True) -> None:
        """Forward, backward, and mostly a step."""
        self.model(torch.ones(1, 2)).sum().backward()
        if steps:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def await_slots(self) -> None:
        """They are asked for at the first boundary."""
        if self.ckpt.step_count:
            assert self.ckpt._client.wait_until(lambda: self.ckpt.ready, 60)

    def saved(self) -> list[int]:
        """Steps of the checkpoints that began."""
        self.ckpt.close(final_checkpoint=False)
        events = RunDirectory(self.run_dir).events()
        return [event.step for event in events if isinstance(event, t.SnapshotBegan)]


def test_only_boundaries_beside_a_checkpoint_are_more_than_counted(
    attach: Callable[..., Any], new_run: Callable[..., str], passed: list[int]
) -> None:
    """At 9 the slot is asked for; at 11 a mark of the random state is left."""
    it = Training(attach, new_run())
    for _ in it.ckpt.steps(28):
        it.iterate()
        it.await_slots()
    assert it.ckpt.step_count == 28
    assert set(passed) >= {5, 6, 7, 8, 13, 14, 15, 16, 17, 18, 23, 24, 25, 26}
    assert not {9, 10, 11, 19, 20, 21, 27, 28} & set(passed)
    assert it.saved() == [10, 20, 28]


def test_what_is_asked_for_in_between_comes_at_its_boundary(
    attach: Callable[..., Any], new_run: Callable[..., str], passed: list[int]
) -> None:
    """A save, a step that a scaler skips, and a stop."""
    it = Training(attach, new_run())
    for step in it.ckpt.steps(100):
        it.iterate(steps=step != 9)  # so the tenth boundary has no whole iteration
        it.await_slots()
        if step == 14:
            it.ckpt.save()
        if step == 17:
            it.ckpt.request_stop("enough")
    assert it.ckpt.stopped
    assert it.ckpt.step_count == 18
    assert not {10, 11, 15, 18} & set(passed)
    assert it.saved() == [11, 15, 18]


@pytest.mark.parametrize("ends_at_once", [True, False])
def test_flags_that_a_test_behind_the_training_changes_are_not_saved(
    attach: Callable[..., Any], new_run: Callable[..., str], ends_at_once: bool
) -> None:
    """A loop that is closed at once has the flags of its end."""
    it = Training(attach, new_run())
    it.ckpt.own_boundary(ends_at_once=ends_at_once)
    for _ in range(5):
        it.iterate()
        it.ckpt.step()
        it.await_slots()
    it.model.requires_grad_(requires_grad=False)
    if ends_at_once:
        it.model.requires_grad_(requires_grad=True)
        it.model.bias.requires_grad_(requires_grad=False)
    it.ckpt.close()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model=model, optimizer=optimizer, run_dir=it.run_dir)
    assert model.weight.requires_grad
    assert model.bias.requires_grad is not ends_at_once
