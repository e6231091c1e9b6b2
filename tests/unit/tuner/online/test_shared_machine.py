"""The controller on a machine whose speed changes: settled soon, both ways, within its limits."""

from collections.abc import Callable

import pytest

from autockpt.tuner.online.controller import Controller, begin
from autockpt.tuner.online.proposals import intervals_of
from autockpt.values.goal import FailureDeclaration, Goal, Limits, Pins
from autockpt.values.plan import CheckpointPlan, TierPlan
from tests.support.machines import SharedMachine
from tests.support.profiles import example_failures, example_recovery

HOUR = 3600.0
CHECKFREQ_BOUND = 0.035
SETTLED = 8
"""Durable checkpoints after a change of speed."""
SEEDS = 8

DECLARED = FailureDeclaration(mtbf_s=HOUR, process_share=0.5)
GOALS = {
    "checkfreq": Goal(
        pins=Pins(interval_rule="checkfreq", in_flight=1), limits=Limits(overhead=CHECKFREQ_BOUND)
    ),
    "auto": Goal(failures=DECLARED),
    "limit": Goal(failures=DECLARED, limits=Limits(overhead=0.02)),
}
NOISE = {"checkfreq": 0.2, "auto": 0.3, "limit": 0.3}


def one_tier(steps: int) -> CheckpointPlan:
    """Every snapshot is persisted."""
    tiers = tuple(TierPlan(tier=name, interval_steps=steps) for name in ("memory", "disk"))
    return CheckpointPlan(plan_id="test", version=1, fingerprint="", tiers=tiers)


def started(name: str, seed: int) -> tuple[SharedMachine, Controller]:
    """A job after an hour and a half, settled at the speed it began with."""
    job = SharedMachine(seed=seed, noise=NOISE[name])
    memory = begin(
        plan=one_tier({"checkfreq": 120, "auto": 320, "limit": 320}[name]),
        failures=example_failures(mtbf_s=HOUR, process_share=0.5),
        recovery=example_recovery(),
    )
    tuned = Controller(memory, goal=GOALS[name])
    job.run(tuned, checkpoints=20, seconds=1.5 * HOUR)
    return job, tuned


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "auto")) for name in GOALS]
)
def test_a_change_of_storage_speed_is_answered_within_eight_checkpoints(name: str) -> None:
    """Four times as slow, then as fast as before: at most three changes each, in its direction.

    The overhead, by the true costs, is then within CheckFreq's bound on every seed; under a limit
    of 2 % and noise of 30 % within a tenth of it, and within it on nearly all.
    """
    limit, beyond = GOALS[name].limits.overhead, 0
    for seed in range(SEEDS):
        job, tuned = started(name, seed)
        for slower in (4.0, 1.0):
            before, changes = intervals_of(tuned.plan)[1], len(job.proposals)
            job.storage = slower
            job.run(tuned, checkpoints=SETTLED)
            settled = intervals_of(tuned.plan)[1]
            assert (settled > before) == (slower > 1.0), (seed, slower)
            assert 1 <= len(job.proposals) - changes <= 3, (seed, slower)
            if limit is not None:
                beyond += job.overhead(tuned) > limit
                assert job.overhead(tuned) <= limit * (1.0 if name == "checkfreq" else 1.12)
            job.run(tuned, checkpoints=4)
    assert beyond <= SEEDS // 4


@pytest.mark.parametrize("name", ["checkfreq", pytest.param("limit", marks=pytest.mark.slow)])
def test_a_settled_interval_keeps_its_budget_and_stays(name: str) -> None:
    """After the storage slowed down, 24 more checkpoints bring no second change of its half."""
    for seed in range(3):
        job, tuned = started(name, seed)
        job.storage = 4.0
        job.run(tuned, checkpoints=SETTLED)
        began_s, paid_s, settled = job.now_s, job.paid_s, intervals_of(tuned.plan)[1]
        job.run(tuned, checkpoints=24)
        limit = GOALS[name].limits.overhead
        assert limit is not None
        assert (job.paid_s - paid_s) / (job.now_s - began_s) <= limit * 1.05
        assert settled / 1.6 < intervals_of(tuned.plan)[1] < settled * 1.6


def crowded(job: SharedMachine) -> None:
    """Another job computes and writes on the machine."""
    job.crowd, job.storage = 1.5, 3.0


def alone(job: SharedMachine) -> None:
    """It has gone."""
    job.crowd, job.storage = 1.0, 1.0


@pytest.mark.parametrize("name", ["auto", pytest.param("checkfreq", marks=pytest.mark.slow)])
def test_a_job_that_comes_and_goes_lengthens_and_shortens_the_interval(name: str) -> None:
    """Everything is slower by half while it runs, the storage three times: there and back."""
    steps: list[Callable[[SharedMachine], None]] = [crowded, alone]
    for seed in range(SEEDS // 2):
        job, tuned = started(name, seed)
        intervals = [intervals_of(tuned.plan)[1]]
        for change in steps:
            change(job)
            job.run(tuned, checkpoints=12)
            intervals.append(intervals_of(tuned.plan)[1])
        quiet, with_other, again = intervals
        assert with_other > 1.2 * quiet, seed
        assert again < with_other / 1.2, seed
        assert "rollback" not in [proposal.kind for proposal in job.proposals]


def test_saves_that_storage_cannot_take_lengthen_the_interval() -> None:
    """Nothing is lost by the formula when checkpoints are skipped, but nothing is gained either."""
    job, tuned = started("auto", seed=5)
    job.slower, job.persist_s = 0.001, 300.0
    job.run(tuned, checkpoints=12)
    skipped = job.skipped
    job.run(tuned, checkpoints=6)
    assert intervals_of(tuned.plan)[1] * job.iteration_s > 270.0
    assert job.skipped - skipped <= 3
