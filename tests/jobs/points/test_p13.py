"""Point 13: the interval follows the measured cost while the job runs (retune: true) or stays."""

import time

import pytest

from autockpt.session.boundaries import iteration_clock
from autockpt.tuner.online.controller import Controller, begin
from autockpt.tuner.online.proposals import intervals_of, with_intervals
from autockpt.values.goal import FailureDeclaration, Goal
from autockpt.values.telemetry import PlanChanged, SnapshotBegan
from tests.support import trainings
from tests.support.jobs import FakeJob
from tests.support.live import PATIENCE_S, Live, granted
from tests.support.profiles import example_failures, example_recovery

HOUR = 3600.0
GOAL = Goal(failures=FailureDeclaration(mtbf_s=2 * HOUR, process_share=0.8))
CHEAP_S, DEAR_S = 0.01, 8.0
"""Stall of a checkpoint whose best interval is far below, far above 60 iterations of a second."""


def test_the_interval_follows_the_cost_in_both_directions() -> None:
    """One running job: checkpoints become dearer, then cheap; the interval grows, then shrinks."""
    job = FakeJob(stall_s=1.0, noise=0.1, seed=13)
    memory = begin(
        plan=trainings.plan(memory=60, disk=600, retune=True),
        failures=example_failures(mtbf_s=2 * HOUR, process_share=0.8),
        recovery=example_recovery(),
    )
    tuned = Controller(memory, goal=GOAL)
    job.run(tuned, until_s=4 * HOUR)
    settled = intervals_of(tuned.plan)[0]
    job.stall_s = DEAR_S
    job.run(tuned, until_s=20 * HOUR)
    longer = intervals_of(tuned.plan)[0]
    job.stall_s = CHEAP_S
    job.run(tuned, until_s=36 * HOUR)
    shorter = intervals_of(tuned.plan)[0]
    assert longer > 1.5 * settled
    assert shorter < settled / 1.5


def seeded(stall_s: float, version: int) -> FakeJob:
    """Two hours of telemetry of a job that ends now, without any change of its plan."""
    now = time.monotonic()
    job = FakeJob(stall_s=stall_s, now_s=now - 2 * HOUR, seed=13)
    memory = begin(
        plan=trainings.plan(memory=60, disk=600, version=version),
        failures=example_failures(), recovery=example_recovery(),
    )  # fmt: skip
    job.run(Controller(memory, goal=GOAL), until_s=now, apply=False)
    return job


@pytest.mark.parametrize("retune", [True, False])
@pytest.mark.parametrize("stall_s", [CHEAP_S, DEAR_S], ids=["cheap", "dear"])
def test_an_attached_run_changes_its_plan_at_one_step_only_if_it_is_retuned(
    stall_s: float, retune: bool, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what rank 0's planner hears to the PlanChanged event, through the real keeper."""
    monkeypatch.setattr(iteration_clock, "BLOCK_S", 1e9)  # the seeded blocks only
    start = trainings.plan(memory=60, disk=600, retune=retune)
    job, ckpt = live.attach(plan=start, goal=GOAL)
    mind = ckpt._plans.tuner
    assert mind is not None
    thoughts = 0
    consider = mind._consider

    def counted() -> None:
        nonlocal thoughts
        consider()
        thoughts += 1

    monkeypatch.setattr(mind, "_consider", counted)
    for event in seeded(stall_s, start.version).log:
        mind.observe(event)
    # From here on it hears nothing more: a checkpoint of this job costs what the machine's load
    # makes of it, and the last three of them may outvote two hours.
    monkeypatch.setattr(ckpt._rank.telemetry, "listener", lambda event: None)
    monkeypatch.setattr(mind, "note_durable", lambda save: None)
    deadline = time.monotonic() + PATIENCE_S
    for step, batch in ckpt.batches(100_000):
        trainings.train_step(job, step, batch)
        assert time.monotonic() < deadline
        if ckpt._rank.plan.version > start.version or (not retune and thoughts >= 4):
            break
    changes = live.events(PlanChanged)
    if not retune:
        assert changes == []
        assert ckpt._rank.plan == start
        return
    (change,) = changes
    assert (change.memory_interval_steps < 60) == (stall_s == CHEAP_S)
    assert change.memory_interval_steps != 60
    assert change.reason
    assert ckpt._rank.plan.tier("memory").interval_steps == change.memory_interval_steps


def test_a_plan_is_followed_from_the_step_of_its_event(live: Live) -> None:
    """No snapshot of the old interval after it, every one of the new."""
    start = trainings.plan(memory=4, disk=4)
    job, ckpt = live.attach(plan=start)
    for step, batch in ckpt.batches(60):
        trainings.train_step(job, step, batch)
        if step == 5:
            ckpt._plans.propose(with_intervals(start, 7, 7))
        granted(ckpt)
    (change,) = live.events(PlanChanged)
    began = [event.step for event in live.events(SnapshotBegan)]
    assert 5 < change.step < 40
    assert {step for step in began if step < change.step} == set(range(4, change.step, 4))
    after = {step for step in range(1, 60) if step % 7 == 0 and step >= change.step}
    assert {step for step in began if step >= change.step} == after | {60}
