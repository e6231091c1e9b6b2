"""Point 13, adaptive frequency: the interval follows the measured cost, up and down, online."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autockpt.tuner.controller import Controller
from autockpt.tuner.proposals import intervals_of
from autockpt.values.goal import FailureDeclaration, Goal, Pins
from autockpt.values.plan import CheckpointPlan, TierPlan
from tests.conftest import end_keeper
from tests.fakes import trainings
from tests.fakes.jobs import FakeJob
from tests.fakes.profiles import example_failures, example_recovery
from tests.kill.ordeal import read_events
from tests.kill.zygote import Zygote
from tests.points.loops import Loop, prepared

HOUR = 3600.0


def controller(memory: int, disk: int, *, retune: bool | None = None) -> Controller:
    """A controller of a running job."""
    plan = CheckpointPlan(
        plan_id="p13", version=1, fingerprint="",
        tiers=(
            TierPlan(tier="memory", interval_steps=memory),
            TierPlan(tier="disk", interval_steps=disk),
        ),
    )  # fmt: skip
    return Controller(
        plan=plan,
        goal=Goal(
            failures=FailureDeclaration(mtbf_s=2 * HOUR, process_share=0.8),
            pins=Pins(retune=retune),
        ),
        failures=example_failures(mtbf_s=2 * HOUR, process_share=0.8),
        recovery=example_recovery(),
    )


@pytest.mark.parametrize("factor", [8.0, 1 / 8.0], ids=["dearer", "cheaper"])
def test_the_interval_follows_the_measured_cost_in_both_directions(factor: float) -> None:
    """A job settles; then every stall costs 8 times more, or less, and the interval follows."""
    job = FakeJob(iteration_s=1.0, stall_s=1.0)
    tuned = controller(60, 600)
    job.run(tuned, until_s=12 * HOUR)
    before = intervals_of(tuned.plan)
    settled = len(job.proposals)
    job.stall_s *= factor
    job.run(tuned, until_s=36 * HOUR)
    after = intervals_of(tuned.plan)
    assert len(job.proposals) > settled
    assert (after[0] > before[0]) == (factor > 1), (before, after)
    assert after[0] != before[0]
    assert "steps -> " in job.proposals[-1].reason


def test_with_re_tuning_off_the_interval_stays() -> None:
    """The same job, the same change, `retune: false`."""
    job = FakeJob(iteration_s=1.0, stall_s=1.0)
    tuned = controller(60, 600, retune=False)
    job.run(tuned, until_s=12 * HOUR)
    job.stall_s *= 8.0
    job.run(tuned, until_s=36 * HOUR)
    assert not job.proposals
    assert intervals_of(tuned.plan) == (60, 600)


def test_a_running_session_takes_a_new_interval(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """Longer, then shorter; from the step that PlanChanged names, saves come at the new pace."""
    loop = Loop(attach, prepared(new_run), 2**12)
    loop.warm_up()
    for version, interval in ((2, 5), (3, 1)):
        plan = trainings.plan(memory=interval, disk=interval, version=version)
        loop.ckpt._propose(plan)
        deadline = time.monotonic() + 60
        while loop.ckpt._plan.version < version:
            assert time.monotonic() < deadline, "the plan was not applied"
            loop.train()
            loop.ckpt.step()
        (changed,) = [e for e in loop.events("PlanChanged") if e["plan_version"] == version]
        assert changed["disk_interval_steps"] == interval
        start = loop.ckpt.step_count
        for _ in range(12):
            loop.train()
            loop.ckpt.step()
            loop.durable()
        loop.ckpt.fence()
        began = {e["step"] for e in loop.events("SnapshotBegan") if e["step"] > start}
        assert began == {s for s in range(start + 1, start + 13) if s % interval == 0}


def test_two_ranks_change_at_one_step(zygote: Zygote, tmp_path: Path) -> None:
    """Proposed by rank 0 in the middle of the training, applied by both before the same step."""
    chosen = replace(trainings.plan(memory=2, disk=2), plan_id="p13")
    run_dir = trainings.prepare(tmp_path / "run", chosen)
    spec = trainings.JobSpec(steps=60, pace_s=0.004, propose_at=10)
    pids = []
    try:
        for rank in range(2):
            out = tmp_path / f"rank-{rank}"
            out.mkdir()
            pids.append(
                zygote.start(
                    trainings.spec_data(spec), run_dir, out, RANK=str(rank), WORLD_SIZE="2",
                    LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", AUTOCKPT_LAUNCH_ID="p13",
                )
            )  # fmt: skip
        for rank, pid in enumerate(pids):
            log = tmp_path / f"rank-{rank}" / "log"
            assert zygote.finish(pid, log) == 0, log.read_text()
    finally:
        end_keeper(run_dir)
    steps = []
    for rank in range(2):
        events = read_events(Path(run_dir) / "telemetry" / f"rank-{rank:05d}.jsonl")
        steps += [event["step"] for event in events if event["event"] == "PlanChanged"]
    assert len(steps) == 2
    assert steps[0] == steps[1] > 10
