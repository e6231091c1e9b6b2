"""Gradients accumulated over several iterations: what is resumed never lacks those of a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autockpt.executors.state.live_state import LiveState
from autockpt.session.boundaries.gradient_accumulation import PATIENCE, Accumulation, accumulation
from tests.support import trainings

SAMPLES = torch.arange(160.0).view(40, 4) / 100


class Accumulated:
    """A training that steps behind every `window`th micro-batch."""

    def __init__(self, window: int) -> None:
        torch.manual_seed(0)
        self.window = window
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.data = DataLoader(SAMPLES, batch_size=1)  # type: ignore[arg-type]

    def train(self, step: int, batch: torch.Tensor) -> None:
        """One micro-batch."""
        (self.model(batch).square().sum() / self.window).backward()
        if (step + 1) % self.window == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def bare(self, steps: int) -> torch.Tensor:
        """Trained without autockpt."""
        for step, batch in zip(range(steps), self.data, strict=False):
            self.train(step, batch)
        return self.model.weight.detach()


class Runs:
    """Runs one job again and again in one directory, as if the former process had died."""

    def __init__(self, attach: Callable[..., Any], run_dir: str) -> None:
        self._attach, self._run_dir = attach, run_dir

    def plan(self, memory: int, disk: int) -> "Runs":
        """Under these intervals."""
        trainings.prepare(self._run_dir, trainings.plan(memory=memory, disk=disk))
        return self

    def go(
        self, window: int, total: int, *, until: int | None = None, save_in: int | None = None
    ) -> tuple[int, torch.Tensor]:
        """(step it began at, weights); `until`: it dies in that iteration."""
        job = Accumulated(window)
        ckpt = self._attach(
            model=job.model, optimizer=job.optimizer, data=job.data, run_dir=self._run_dir
        )
        first = ckpt.step_count
        for step, batch in ckpt.batches(total):
            if step == save_in:
                ckpt.save()
            job.train(step, batch)
            if step == first + window:
                assert ckpt._client.wait_until(lambda: ckpt.ready, 20)
            if step == until:
                assert ckpt.wait_durable(20)
                ckpt.close(final_checkpoint=False)
                break
        return first, job.model.weight.detach()


@pytest.fixture
def runs(attach: Callable[..., Any], new_run: Callable[..., str]) -> Runs:
    """In a directory that nothing has run in."""
    return Runs(attach, new_run())


@pytest.mark.parametrize(
    ("window", "memory", "until", "first"), [(4, 3, 10, 8), (5, 1, 13, 10), (7, 2, 24, 21)]
)
def test_a_resume_between_two_steps_trains_the_same_numbers(
    runs: Runs, window: int, memory: int, until: int, first: int
) -> None:
    """Every micro-batch is a boundary; a checkpoint that is due at one waits for the step."""
    runs.plan(memory, memory).go(window, 40, until=until)
    began, weights = runs.go(window, 40)
    assert began == first
    assert torch.equal(weights, Accumulated(window).bare(40))


def test_a_checkpoint_asked_for_between_two_steps_is_of_the_next_one(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    """save() in the second of four micro-batches, under a plan that has nothing due."""
    runs.plan(1000, 1000).go(4, 40, until=14, save_in=9)
    assert capfd.readouterr().err.count("checkpoints wait for the next optimizer's step") == 1
    began, weights = runs.go(4, 40)
    assert began == 12
    assert torch.equal(weights, Accumulated(4).bare(40))


def test_a_run_that_ends_between_two_steps_goes_on_exactly_when_it_is_made_longer(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last checkpoint is of the last step that fits in front of the end."""
    _, weights = runs.plan(1000, 1000).go(4, 18)
    assert torch.equal(weights, Accumulated(4).bare(18))
    assert "missing in the last checkpoint" not in capfd.readouterr().err
    began, weights = runs.go(4, 40)
    assert began == 16
    assert torch.equal(weights, Accumulated(4).bare(40))


def test_a_last_checkpoint_that_lacks_gradients_says_so(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a training too short for a step: what there is is kept."""
    runs.plan(2, 2).go(8, 5)
    said = capfd.readouterr().err
    assert "no optimizer stepped behind step 0; the gradients since then are missing" in said
    assert runs.go(8, 5)[0] == 5


def decided(it: Accumulation, steps: str, *, interval: int = 1) -> str:
    """For iterations with ("s") and without a step: may a checkpoint be of them (y, n)?"""
    answers = ""
    for step in steps:
        it.iterated(stepped=step == "s")
        answers += "y" if it.is_whole(interval) else "n"
    return answers


def test_ranks_without_gradients_decide_as_those_that_have_some() -> None:
    """A frozen one: by the count of steps, and before the first of them by waiting too."""
    training = "---s---s---s-s"
    some = decided(Accumulation(lambda: True, opaque=False), training)
    frozen = decided(Accumulation(lambda: False, opaque=True), training)
    assert some == frozen == "nnnynnnynnnyny"


def test_a_skipped_step_puts_a_checkpoint_off_by_one_and_no_more() -> None:
    """GradScaler leaves steps out; gradients of the one before may still stand."""
    assert decided(Accumulation(lambda: False, opaque=False), "s-ss--s") == "ynyynyy"
    assert decided(Accumulation(lambda: True, opaque=False), "s-ss--s") == "ynyynny"


def test_a_window_may_grow_to_any_length() -> None:
    """As long as there are gradients that a step has been seen to follow."""
    it = Accumulation(lambda: True, opaque=False)
    assert decided(it, "s" + (2 * PATIENCE) * "-" + "s") == "y" + (2 * PATIENCE) * "n" + "y"


def test_a_loop_whose_optimizer_never_steps_is_protected_in_the_end() -> None:
    """At once without gradients; with them after a while, and that is known."""
    idle = Accumulation(lambda: False, opaque=False)
    assert decided(idle, 3 * "-") == "yyy"
    assert not idle.gave_up
    by_hand = Accumulation(lambda: True, opaque=False)
    assert decided(by_hand, (PATIENCE - 1) * "-") == (PATIENCE - 1) * "n"
    assert not by_hand.gave_up
    assert decided(by_hand, "-") == "y"
    assert by_hand.gave_up
    rare = Accumulation(lambda: True, opaque=False)
    assert decided(rare, PATIENCE * "-", interval=PATIENCE)[-1] == "n"


def test_of_a_frozen_rank_among_others_the_gradients_are_not_known() -> None:
    """Alone there is nobody else to have some."""
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    state = LiveState.of(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert decided(accumulation(state, world_size=1), "--") == "yy"
    assert decided(accumulation(state, world_size=2), "--") == "nn"


@pytest.mark.parametrize(
    ("window", "since", "has_rest"), [(1, 1, False), (1, 2, False), (4, 2, True), (4, 4, False)]
)
def test_gradients_of_a_step_that_was_skipped_are_no_rest(
    window: int, since: int, has_rest: bool
) -> None:
    """GradScaler leaves out a step whose gradients have overflowed: nothing uses them."""
    counted = Accumulation(lambda: True, opaque=False)
    counted.iterated(stepped=False)
    assert counted.has_rest()  # nothing is known of steps yet
    counted = Accumulation(lambda: True, opaque=False)
    for done in range(1, window + 1):
        counted.iterated(stepped=done == window)
    for _ in range(since):
        counted.iterated(stepped=False)
    assert counted.has_rest() is has_rest
