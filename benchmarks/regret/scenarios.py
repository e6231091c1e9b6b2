"""Random jobs and clusters, and what each rule would choose for them."""

import math
from dataclasses import dataclass, replace

import numpy as np

from autockpt.policies.cost_model.costs import Costs
from autockpt.policies.cost_model.expectation import BASELINE_INTERVAL_S, split_rates
from autockpt.policies.interval.choose import (
    LONGEST_S,
    Rates,
    bounds_of,
    choose_intervals,
    tiers_of,
)
from autockpt.policies.interval.nesting import Tiers
from autockpt.profiles.failures import estimate_rates
from autockpt.values.failure import FailureRecord
from autockpt.values.goal import Goal
from autockpt.values.plan import safe_default_plan
from autockpt.values.profile import Estimate, RecoveryTimes

MOST_WASTE = 0.5
"""A job that loses half of its time whatever one does is drawn again: no interval helps it."""
AT_ONCE = Estimate(value_s=0.0, source="assumed")
NO_OUTAGE = RecoveryTimes(
    detect=AT_ONCE, restart=AT_ONCE, restore_memory=AT_ONCE, restore_disk=AT_ONCE
)
"""Gaps between failures are of all time here, so no rate is converted from that of training."""
Plan = tuple[Tiers, int, int]
"""Tiers as they are, and intervals (memory, disk) in iterations; memory 0: off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One job on one cluster."""

    nodes: int
    costs: Costs
    rates: Rates

    @property
    def tiers(self) -> Tiers:
        """With both tiers on."""
        return tiers_of(self.costs, self.rates, memory_on=True)

    @property
    def alone(self) -> Tiers:
        """Disk only, which then pays for its snapshots."""
        return tiers_of(self.costs, self.rates, memory_on=False)


def draw(chance: np.random.Generator) -> Scenario:
    """Three to four orders of magnitude of everything; drawn again where no interval helps."""
    while True:
        scenario = _draw(chance)
        memory, disk = chosen(scenario, scenario.rates)
        if scenario.tiers.waste(memory, disk).total < MOST_WASTE:
            return scenario


def _draw(chance: np.random.Generator) -> Scenario:
    def between(low: float, high: float) -> float:
        return float(math.exp(chance.uniform(math.log(low), math.log(high))))

    copy_s = between(0.01, 30.0)
    persist_s = copy_s + between(0.05, 600.0)
    stall_s = copy_s * between(0.001, 1.0)
    costs = Costs(
        iteration_s=between(0.05, 30.0),
        stall_s=stall_s,
        stall_high_s=stall_s,
        copy_s=copy_s,
        copy_high_s=copy_s,
        persist_s=persist_s,
        persist_high_s=persist_s,
        copy_slowdown_s=copy_s * chance.uniform(0.0, 0.2),
        persist_slowdown_s=persist_s * chance.uniform(0.0, 0.2),
        restart_s=between(10.0, 900.0),
        restore_memory_s=copy_s,
        restore_disk_s=persist_s,
    )
    mtbf_s, share = between(300.0, 10 * 86400.0), chance.uniform(0.05, 0.95)
    rates = Rates(memory_per_s=share / mtbf_s, disk_per_s=(1 - share) / mtbf_s)
    return Scenario(nodes=round(between(1, 2048)), costs=costs, rates=rates)


def chosen(scenario: Scenario, believed: Rates) -> tuple[int, int]:
    """What `decide` takes where it believes in these failures."""
    found = choose_intervals(scenario.costs, believed, Goal(), memory_on=True, slots=3, sync=False)
    return found.memory_steps, found.disk_steps


def learned(scenario: Scenario, gaps_s: np.ndarray, alive: np.ndarray) -> Rates:
    """What is believed after these failures of this job alone, from the priors."""
    records = [
        FailureRecord(
            wall="",
            kind="process" if lives else "node",
            what="",
            node=0,
            step=0,
            exposure_s=float(gap_s),
        )
        for gap_s, lives in zip(gaps_s, alive, strict=True)
    ]
    return split_rates(estimate_rates(records, nodes=scenario.nodes), Goal(), NO_OUTAGE)


def default(scenario: Scenario) -> Plan:
    """The plan of a job that nobody measured; a disk checkpoint that is not ready is skipped."""
    plan, tiers = safe_default_plan(), scenario.tiers
    memory, disk = (plan.tier(name).interval_steps for name in ("memory", "disk"))
    times = math.ceil(scenario.costs.persist_high_s / tiers.periods_s(memory, disk)[1] - 1e-9)
    return tiers, memory, disk * max(1, times)


def habit(scenario: Scenario) -> Plan:
    """A blocking save every 30 minutes, disk only."""
    costs = scenario.costs
    blocking = replace(
        costs,
        stall_s=costs.copy_s,
        blocked_s=costs.persist_s - costs.copy_s,
        copy_slowdown_s=0.0,
        persist_slowdown_s=0.0,
    )
    tiers = tiers_of(blocking, scenario.rates, memory_on=False)
    return tiers, 0, max(1, round(BASELINE_INTERVAL_S / costs.iteration_s))


def every_plan(scenario: Scenario, *, ratio: float) -> list[Plan]:
    """All plans that the bounds allow, on a geometric grid of both intervals; or disk alone."""
    most = max(1, math.floor(LONGEST_S / scenario.costs.iteration_s))
    grid = _grid(1, most, ratio)
    pairs = [(k, k * n) for k in grid for n in grid if k * n <= most]
    plans = [(scenario.tiers, k, disk) for k, disk in pairs]
    plans += [(scenario.alone, 0, k) for k in grid]
    return [plan for plan in plans if allowed(scenario, plan)]


def near(scenario: Scenario, plan: Plan, *, within: float, ratio: float) -> list[Plan]:
    """The plans around one, up to `within` times longer or shorter, on a finer grid."""
    tiers, memory, disk = plan
    if not memory:
        steps = _grid(disk / within, disk * within, ratio)
        plans: list[Plan] = [(tiers, 0, k) for k in steps]
    else:
        bases = _grid(memory / within, memory * within, ratio)
        snapshots = _grid(disk / memory / within, disk / memory * within, ratio)
        plans = [(tiers, k, k * n) for k in bases for n in snapshots]
    return [one for one in plans if allowed(scenario, one)] or [plan]


def allowed(scenario: Scenario, plan: Plan) -> bool:
    """Inside the bounds that `decide` keeps: one snapshot and one persist at a time, a day."""
    tiers, memory, disk = plan
    bounds = bounds_of(scenario.costs, Goal(), slots=3, sync=False)
    memory_s, disk_s = tiers.periods_s(memory, disk)
    slack = 1 + 1e-9
    return (
        memory_s * slack >= bounds.memory_min_s[0]
        and disk_s * slack >= bounds.disk_min_s[0]
        and disk_s <= bounds.disk_max_s[0] * slack
    )


def _grid(low: float, high: float, ratio: float) -> list[int]:
    low, high = max(1.0, low), max(1.0, high)
    count = 1 + math.ceil(math.log(high / low) / math.log(ratio)) if high > low else 1
    return sorted({round(value) for value in np.geomspace(low, high, count)})
