"""Costs that jump in a simulated job and come back, and each decision of the real controller.

python -m tests.unit.tuner.online.disturbances       # the table of docs/concepts/policy.md
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autockpt.policies.codec_speeds import CodecAtSpeed
from autockpt.policies.redundancy.link_speeds import profiled_s_per_gb, schemes_by_speed
from autockpt.tuner.online.controller import Controller, begin
from autockpt.tuner.online.proposals import intervals_of
from autockpt.tuner.online.watches.exchange import ExchangeWatch
from autockpt.values.goal import FailureDeclaration, Goal
from autockpt.values.plan import CheckpointPlan
from autockpt.values.profile import Estimate
from autockpt.values.redundancy import Redundancy, said
from autockpt.values.telemetry import PlanChanged
from autockpt.values.units import format_rate
from tests.support.jobs import FakeJob
from tests.support.profiles import example_failures, example_recovery
from tests.unit.policies.interval.test_choose import costs
from tests.unit.policies.redundancy.test_choose import cluster
from tests.unit.tuner.online.test_controller import HOUR, plan

PERSIST_S = 30.0
MOST_CHANGES = 2
ZSTD = {"parameters": "zstd", "moments": "zstd"}
TABLE = tuple(CodecAtSpeed(slower=2.0**n, codec=ZSTD, factor=0.6) for n in range(1, 6))
COPIES = Redundancy(scheme="replicas", copies=3, placement="mixed")
TOGETHER = (5.0, 4.0, 0.3, 0.3)
"""Nodes are often lost in pairs,"""
FROM_DISK_S = 600.0
"""and a restore from disk takes long: a third copy pays while the link is fast."""
GB = 10**9
NODE_GB = 0.72


@dataclass(frozen=True, kw_only=True)
class World:
    """The surroundings of the job in one phase."""

    storage: float = 1.0
    """Times as slow as profiled,"""
    link: float = 1.0
    """and the same of the link to other nodes."""
    stall_s: float = 0.5
    slower: float = 0.05
    """Of iterations beside a persist."""
    starves: bool = False
    """Two slots are too few."""
    free_bytes: int = 20 * GB


PHASES: dict[str, World] = {
    "as profiled": World(),
    "storage 4 times slower": World(storage=4.0),
    "storage 20 times slower": World(storage=20.0),
    "storage as before": World(),
    "a co-runner comes": World(stall_s=2.0, slower=0.2),
    "the co-runner goes": World(),
    "link half as fast": World(link=2.0),
    "link as before": World(),
    "saves lack a slot": World(starves=True),
    "host short of memory": World(starves=True, free_bytes=300 * 2**20),
    "memory as before": World(starves=True),
}
DECISIONS: dict[str, Callable[[CheckpointPlan], object]] = {
    "intervals": intervals_of,
    "codec": lambda now: ", ".join(sorted(set(now.tier("disk").codec.values()))) or "none",
    "staging": lambda now: now.staging.schedule,
    "way of writing": lambda now: str(now.staging.write_way),
    "scheme of copies": lambda now: said(now.redundancy),
    "rate of copies": lambda now: format_rate(now.redundancy.rate_bytes_per_s),
    "slots": lambda now: now.slots,
}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase, as it went."""

    name: str
    plans: tuple[CheckpointPlan, ...]
    """Before it, and after each change."""
    first_s: float | None
    """From its begin to the first change; None: there was none."""

    def changes(self, decision: str) -> list[object]:
        """The values that a decision was changed to."""
        seen = [DECISIONS[decision](one) for one in self.plans]
        return [new for old, new in itertools.pairwise(seen) if new != old]

    @property
    def disk_steps(self) -> int:
        """Interval on disk at its end; an iteration takes a second."""
        return intervals_of(self.plans[-1])[1]


def played(hours: float = 5.0, seed: int = 2) -> Iterator[Phase]:
    """Each phase, so long."""
    world = World()
    profile = cluster(slowdown=0.2, host=5e8)
    profile = replace(profile, failures=replace(profile.failures, together=TOGETHER))
    schemes = schemes_by_speed(profile, Goal(), COPIES)
    table = schemes[0].table
    at = next(one for one in table if one.slower == 1.0)
    watch = ExchangeWatch(table=table, profiled_s_per_gb=profiled_s_per_gb(profile, COPIES))

    def persist_s(now: CheckpointPlan) -> float:
        encoded = bool(now.tier("disk").codec)
        return PERSIST_S * (max(0.6 * world.storage, 1.3) if encoded else world.storage)

    def exchange_s(now: CheckpointPlan) -> tuple[float, float]:
        sent_gb = NODE_GB * now.redundancy.sent_share
        moving_s = world.link * watch.profiled_s_per_gb
        return max(sent_gb * moving_s, sent_gb * GB / now.redundancy.rate_bytes_per_s), moving_s

    memory = begin(
        plan=replace(plan(), redundancy=replace(COPIES, rate_bytes_per_s=at.rate_bytes_per_s),
                     slots=2),
        failures=example_failures(mtbf_s=2 * HOUR),
        recovery=replace(
            example_recovery(),
            restore_disk=Estimate(value_s=FROM_DISK_S, source="measured", n=3),
        ),
        prior=replace(costs(persist_s=PERSIST_S, restore_disk_s=FROM_DISK_S), peers=at.peers),
        codecs=TABLE, exchange=watch, schemes=schemes,
    )  # fmt: skip
    goal = Goal(failures=FailureDeclaration(mtbf_s=2 * HOUR))
    controller = Controller(memory, goal=goal)
    job = FakeJob(
        noise=0.1, seed=seed, persist_of=persist_s, exchange_of=exchange_s,
        host_of=lambda now: (world.starves and now.slots < 3, world.free_bytes),
    )  # fmt: skip
    for name, world in PHASES.items():
        job.stall_s, job.slower = world.stall_s, world.slower
        plans, before, began_s = [controller.plan], len(job.proposals), job.now_s
        job.run(controller, until_s=job.now_s + hours * HOUR)
        plans += [proposal.plan for proposal in job.proposals[before:]]
        came_s = [e.at_s for e in job.log if isinstance(e, PlanChanged) and e.at_s > began_s]
        first_s = came_s[0] - began_s if came_s else None
        yield Phase(name=name, plans=tuple(plans), first_s=first_s)


def table_of(phases: list[Phase]) -> str:
    """Markdown: what each decision was changed to, in order; "-" where it stayed."""
    heads = ["disturbance", *DECISIONS]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for phase in phases:
        cells = [phase.name]
        for decision in DECISIONS:
            changed = phase.changes(decision)
            texts = [
                "{} / {}".format(*one) if isinstance(one, tuple) else str(one) for one in changed
            ]
            cells.append(", ".join(texts) or "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table_of(list(played())))
