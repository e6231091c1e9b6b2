"""A real run writes down what its controller saw and answered, and that replays to the same."""

import time
from collections.abc import Callable

import pytest

from autockpt.cli.app import run
from autockpt.profiling.facts.start_decision import MEMORY, read_memory
from autockpt.run_directory import RunDirectory
from autockpt.session.boundaries import iteration_clock
from autockpt.session.tuning import autotuner
from autockpt.tuner.online.recording import replay
from autockpt.values.failure import FailureRecord
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


def test_a_change_of_the_plan_is_remembered_at_once(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process finds plan and memory alike, however soon this one is killed."""
    monkeypatch.setattr(autotuner, "REMEMBER_S", (3600.0, 3600.0))
    until(live, Goal(failures=FAILING), PlanChanged, monkeypatch)
    run_files, deadline = RunDirectory.open(live.run_dir), time.monotonic() + PATIENCE_S
    while (kept := read_memory(run_files)) is None or kept.plan != run_files.read_plan():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def test_a_start_that_keeps_the_plan_promises_anew(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the failures on record and the costs that were seen: not those of an earlier start."""
    monkeypatch.setattr(iteration_clock, "BLOCK_S", 0.05)
    monkeypatch.setattr(autotuner, "THINK_S", 0.02)
    pinned = Goal(pins=Pins(memory_interval_steps=8, disk_interval_steps=8, retune=False))
    files = RunDirectory.create(live.run_dir)
    noted = files.controller / MEMORY
    train_until(live, pinned, lambda: files.read_decision() is not None and noted.exists())
    before = files.read_decision()
    assert before is not None
    assert before.inputs is not None
    assert before.inputs.failures.per_job.events == 0
    live.leave()
    died = FailureRecord(
        wall="2026-01-01T00:00:00Z", kind="process", what="trainer", node=0, step=8,
        exposure_s=600.0, detect_s=0.1, restart_s=40.0, restore_s=0.2, source="memory",
    )  # fmt: skip
    files.append_failure(died)

    def promised() -> bool:
        now = files.read_decision()
        return now is not None and now.inputs is not None and now.inputs.recovery.restart.n == 1

    train_until(live, pinned, promised)
    after = files.read_decision()
    assert after is not None
    assert after.inputs is not None
    assert after.plan.tiers == before.plan.tiers
    assert after.inputs.failures.per_job.events == 1
    # Not the waste: stalls beside iterations of a millisecond differ by more from start to start.
    assert after.expected.recovery_memory_s > before.expected.recovery_memory_s


def train_until(live: Live, goal: Goal, condition: Callable[[], bool]) -> None:
    """Trains, at most a minute."""
    job, ckpt = live.attach(goal=goal)
    deadline = time.monotonic() + 2 * PATIENCE_S
    for step, batch in ckpt.batches(1_000_000):
        trainings.train_step(job, step, batch)
        if step % 8 == 0 and condition():
            break
        assert time.monotonic() < deadline
