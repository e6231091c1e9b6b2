"""Costs jump in a run and come back: each decision follows, and undoes nothing within a phase."""

import itertools
from collections.abc import Callable

from autockpt.policies.codec_speeds import CodecAtSpeed
from autockpt.tuner.online.controller import Controller, begin
from autockpt.tuner.online.proposals import intervals_of
from autockpt.values.goal import FailureDeclaration, Goal
from autockpt.values.plan import CheckpointPlan
from autockpt.values.telemetry import PlanChanged
from tests.support.jobs import FakeJob
from tests.support.profiles import example_failures, example_recovery
from tests.unit.policies.interval.test_choose import costs
from tests.unit.tuner.online.test_controller import HOUR, plan

PERSIST_S = 30.0
ZSTD = {"parameters": "zstd", "moments": "zstd"}
TABLE = tuple(CodecAtSpeed(slower=2.0**n, codec=ZSTD, factor=0.6) for n in range(1, 6))
PHASES = {
    "as profiled": (1.0, 0.5, 0.05),
    "storage 4 times slower": (4.0, 0.5, 0.05),
    "storage 20 times slower": (20.0, 0.5, 0.05),
    "storage as before": (1.0, 0.5, 0.05),
    "a co-runner comes": (1.0, 2.0, 0.2),
    "the co-runner goes": (1.0, 0.5, 0.05),
}
"""Times as slow as profiled, stall in seconds, slow-down beside a persist."""
SETTINGS: dict[str, Callable[[CheckpointPlan], object]] = {
    "intervals": intervals_of,
    "codec": lambda now: bool(now.tier("disk").codec),
    "schedule": lambda now: now.staging.schedule,
    "write": lambda now: now.staging.write_way,
}


def test_every_decision_follows_with_two_changes_a_phase_and_undoes_none() -> None:
    """Storage 4 and 20 times slower and back, a job beside it that comes and goes.

    Where the storage is fast again, intervals follow within eight checkpoints of the new one.
    """
    slower = 1.0

    def persist_s(now: CheckpointPlan) -> float:
        encoded = bool(now.tier("disk").codec)
        return PERSIST_S * (max(0.6 * slower, 1.3) if encoded else slower)

    memory = begin(
        plan=plan(), failures=example_failures(mtbf_s=2 * HOUR), recovery=example_recovery(),
        prior=costs(persist_s=PERSIST_S), codecs=TABLE,
    )  # fmt: skip
    goal = Goal(failures=FailureDeclaration(mtbf_s=2 * HOUR))
    controller = Controller(memory, goal=goal)
    job = FakeJob(noise=0.1, seed=2, persist_of=persist_s)
    ends: dict[str, CheckpointPlan] = {}
    for phase, now in PHASES.items():
        slower, job.stall_s, job.slower = now
        plans, before, began_s = [controller.plan], len(job.proposals), job.now_s
        job.run(controller, until_s=job.now_s + 8 * HOUR)
        plans += [proposal.plan for proposal in job.proposals[before:]]
        ends[phase] = controller.plan
        if phase == "storage as before":
            came_s = [e.at_s for e in job.log if isinstance(e, PlanChanged) and e.at_s > began_s]
            assert came_s[0] - began_s <= 8 * intervals_of(controller.plan)[1], phase
        for decision, setting in SETTINGS.items():
            seen = [setting(one) for one in plans]
            changes = [new for old, new in itertools.pairwise(seen) if new != old]
            assert len(changes) <= 2, (phase, decision, changes)
            assert seen[0] not in changes, (phase, decision, changes)
    encoded = [phase for phase, end in ends.items() if end.tier("disk").codec]
    assert encoded == ["storage 4 times slower", "storage 20 times slower"]
    disk = {phase: intervals_of(end)[1] for phase, end in ends.items()}
    assert disk["storage 20 times slower"] > 2 * disk["storage as before"]
    memory_steps = {phase: intervals_of(end)[0] for phase, end in ends.items()}
    assert memory_steps["a co-runner comes"] > 1.5 * memory_steps["the co-runner goes"]
