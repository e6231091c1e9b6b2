"""A real run writes down what its controller saw and answered, and that replays to the same."""

import time

import pytest

from autockpt.cli.app import run
from autockpt.run_directory import RunDirectory
from autockpt.session.boundaries import iteration_clock
from autockpt.session.tuning import autotuner
from autockpt.tuner.online.recording import replay
from autockpt.values.goal import FailureDeclaration, Goal, Pins
from autockpt.values.telemetry import PlanChanged, PlanChangeWithheld
from tests.support import trainings
from tests.support.live import PATIENCE_S, Live, granted

pytestmark = pytest.mark.usefixtures("one_thread")

FAR = 24
"""Iterations between checkpoints at first."""
FAILING = FailureDeclaration(mtbf_s=0.01, process_share=0.5)
"""So often that the best interval is the shortest that storage takes."""


def until(live: Live, goal: Goal, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains from a plan far off until an event of this kind, at most a minute."""
    monkeypatch.setattr(iteration_clock, "BLOCK_S", 0.05)
    monkeypatch.setattr(autotuner, "THINK_S", 0.02)
    start = trainings.plan(memory=FAR, disk=FAR, version=0, retune=goal.pins.retune or True)
    job, ckpt = live.attach(plan=start, goal=goal)
    deadline = time.monotonic() + 2 * PATIENCE_S
    for step, batch in ckpt.batches(100_000):
        trainings.train_step(job, step, batch)
        if (step + 1) % FAR == 0:
            ckpt.wait_durable(PATIENCE_S)  # a slot is free again
            granted(ckpt)
        if step % 8 == 0 and live.events(kind):
            break
        assert time.monotonic() < deadline


def test_a_real_run_replays_to_the_same_decisions(
    live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The change that the run made is what the replay proposes; the command says so."""
    until(live, Goal(failures=FAILING), PlanChanged, monkeypatch)
    (change,) = live.events(PlanChanged)[:1]
    live.leave()
    played = replay(RunDirectory.open(live.run_dir).recordings())
    assert played.difference is None
    assert played.proposals[0].reason == change.reason
    assert run(["explain", live.run_dir, "--replay"]) == 0
    assert "the same decisions" in capsys.readouterr().out


def test_an_observing_policy_changes_nothing_and_says_what_it_would(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an event; the plan stays."""
    goal = Goal(failures=FAILING, pins=Pins(retune="observe"))
    until(live, goal, PlanChangeWithheld, monkeypatch)
    withheld = live.events(PlanChangeWithheld)[0]
    assert withheld.kind == "first"
    assert withheld.memory_interval_steps < FAR
    assert live.events(PlanChanged) == []
