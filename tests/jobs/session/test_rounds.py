"""Iterations of several optimizers where the script says nothing: each has stepped."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autockpt.session.boundaries.optimizer_rounds import PATIENCE, Rounds
from tests.support import trainings


class Adversaries:
    """A generator and a discriminator; the discriminator's weight is minus its updates."""

    def __init__(self, attach: Callable[..., Any], run_dir: str) -> None:
        torch.manual_seed(0)
        self.g, self.d = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.steps_g = torch.optim.SGD(self.g.parameters(), lr=0.01)
        self.steps_d = torch.optim.SGD(self.d.parameters(), lr=0.01)
        self.updates_d = self.updates_g = 0
        self.ckpt = attach(
            model={"g": self.g, "d": self.d}, run_dir=run_dir,
            optimizer={"optimizer_g": self.steps_g, "optimizer_d": self.steps_d},
        )  # fmt: skip

    def train_d(self) -> None:
        """Its turn."""
        self.steps_d.zero_grad()
        self.d(self.g(torch.randn(2, 4)).detach()).square().sum().backward()
        self.steps_d.step()
        self.updates_d += 1

    def train_g(self) -> None:
        """Its turn."""
        self.steps_g.zero_grad()
        (-self.d(self.g(torch.randn(2, 4)))).sum().backward()
        self.steps_g.step()
        self.updates_g += 1

    def weights(self) -> torch.Tensor:
        """Of both."""
        return torch.cat([self.g.weight.detach().flatten(), self.d.weight.detach().flatten()])


@pytest.fixture
def begin(attach: Callable[..., Any], new_run: Callable[..., str]) -> Callable[..., Adversaries]:
    """Begins, or goes on with, a run of them."""

    def make(name: str = "run") -> Adversaries:
        run_dir = new_run(name)
        trainings.prepare(run_dir, trainings.plan(memory=3, disk=3))
        return Adversaries(attach, run_dir)

    return make


def test_a_resumed_loop_over_two_optimizers_makes_all_updates(
    begin: Callable[..., Adversaries], capfd: pytest.CaptureFixture[str]
) -> None:
    """Each steps once an iteration: 8 iterations are 8 updates of both, dead in the middle or
    not, to the bit."""
    whole = begin("undisturbed")
    for _ in range(8):
        whole.train_d()
        whole.train_g()
    it = begin()
    for step in range(5):
        assert step < 2 or it.ckpt._client.wait_until(lambda: it.ckpt.ready, 20)
        it.train_d()
        assert it.ckpt.step_count == step
        it.train_g()
    assert it.ckpt.wait_durable(20)
    it.ckpt.close(final_checkpoint=False)
    again = begin()
    assert again.ckpt.step_count == 3
    for _ in range(again.ckpt.step_count, 8):
        again.train_d()
        again.train_g()
    assert (again.updates_d, again.updates_g) == (5, 5)
    assert torch.equal(again.weights(), whole.weights())
    again.ckpt.close()
    assert begin().ckpt.step_count == 8
    assert "has stepped again" not in capfd.readouterr().err


def test_optimizers_that_step_unevenly_are_told_once(
    begin: Callable[..., Adversaries], capfd: pytest.CaptureFixture[str]
) -> None:
    """Two steps of the critic to one: checkpoints are of whole rounds."""
    it = begin()
    for round_ in range(3):
        it.train_d()
        assert it.ckpt.step_count == round_
        it.train_d()
        it.train_g()
    it.train_d()
    it.ckpt.close()
    said = capfd.readouterr().err
    assert said.count("optimizer_d has stepped again before optimizer_g did") == 1
    assert "call ckpt.step() at the end of each iteration" in said
    assert "left within the iteration after step 3" in said


def test_an_optimizer_that_does_not_step_is_not_waited_for_for_ever() -> None:
    """Nor one that stops; from when it steps again it belongs to the round."""
    rounds = Rounds(["d", "g"])
    for _ in range(PATIENCE):
        rounds.stepped("d")
        assert not rounds.complete
    assert rounds.uneven == ("d", "g")
    rounds.stepped("d")
    assert rounds.complete
    for _ in range(3):
        rounds.begin()
        rounds.stepped("d")
        assert rounds.complete
        assert rounds.uneven is None
    rounds.stepped("g")
    rounds.begin()
    rounds.stepped("d")
    assert not rounds.complete
