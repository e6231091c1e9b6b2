"""From costs, failure rates and limits to whole iterations between checkpoints, for both tiers.

Pins come first, then the rule (waste or CheckFreq) within the bounds.  Among the rounded candidates
that keep every limit, the waste rate decides.  Ties go to the longer interval (less wear).
"""

import math
from dataclasses import dataclass, replace

from autockpt.policies.cost_model.costs import Costs
from autockpt.policies.cost_model.waste import WasteParts
from autockpt.policies.interval.closed_forms import checkfreq_steps
from autockpt.policies.interval.nesting import Bounds, Tiers, free_pairs, multiples, optimum_s
from autockpt.policies.interval.preemption import answered_per_s, with_answered
from autockpt.values.decision_inputs import TierCost
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.plan import interval_conflict
from autockpt.values.units import format_duration, format_fraction

TIE = 1e-3
"""Relative difference of tunable waste below which the longer interval wins."""
NEAR = 0.01
"""An interval in seconds may be so much longer or shorter in whole iterations, as a fraction,"""
FEW = 33
"""and so many snapshots or fewer between two persists are all considered."""
FLAT = 1.56
"""Objectives `stall` and `durability` stretch or shrink the optimum by this: 10 % more waste."""
LONGEST_S = 86400.0
"""Without limits.lost_time no interval is longer than a day, because not every failure is
counted."""
CHECKFREQ_BUDGET = 0.05
"""Overhead budget of the CheckFreq rule without `limits.overhead`: the paper's example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Interruptions per second, by what serves them when both tiers are on."""

    memory_per_s: float
    """This node's memory survives."""
    disk_per_s: float
    """It does not."""
    preempted_per_s: float = 0.0
    """Announced ends of nodes, beside both."""
    notice_s: float = 0.0
    """How long before the end they are announced."""
    silent_per_s: float = 0.0
    """Of `disk_per_s`: errors of the state that are noticed late."""
    noticed_after_s: float = 0.0
    """How late."""

    @property
    def total_per_s(self) -> float:
        """All interruptions of the job."""
        return self.memory_per_s + self.disk_per_s + self.preempted_per_s

    def scaled(self, factor: float) -> "Rates":
        """The same mix, `factor` times as often."""
        return replace(
            self,
            memory_per_s=self.memory_per_s * factor,
            disk_per_s=self.disk_per_s * factor,
            preempted_per_s=self.preempted_per_s * factor,
            silent_per_s=self.silent_per_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """The chosen intervals and their promises."""

    memory_steps: int
    """0: the memory tier is off."""
    disk_steps: int
    memory_period_s: float
    disk_period_s: float
    waste: WasteParts
    optimum_memory_s: float
    """The formula's period before bounds and rounding; 0 when the tier is off."""
    optimum_disk_s: float
    binding: str
    """The bound that cut the formula's interval; "" without one."""
    runner_up: tuple[int, int] | None = None
    runner_up_waste: float | None = None


def tiers_of(costs: Costs, rates: Rates, *, memory_on: bool) -> Tiers:
    """The two tiers; with memory off, disk serves every failure and pays for its snapshot.

    With peers, memory serves some failures of nodes as well.
    """
    if not memory_on:
        disk = costs.disk_tier(rates.total_per_s, alone=True)
        return Tiers(
            iteration_s=costs.iteration_s, memory=None, disk=_noticed_late(disk, rates),
            boundary_s=costs.boundary_s,
        )  # fmt: skip
    from_peers = rates.disk_per_s * costs.peers.served if costs.peers is not None else 0.0
    answered = answered_per_s(rates.preempted_per_s, rates.notice_s, costs, memory=True)
    left = rates.disk_per_s - from_peers + rates.preempted_per_s - answered
    memory = costs.memory_tier(rates.memory_per_s, from_peers_per_s=from_peers)
    return Tiers(
        iteration_s=costs.iteration_s,
        memory=with_answered(memory, answered, costs),
        disk=_noticed_late(costs.disk_tier(left, alone=False), rates),
        boundary_s=costs.boundary_s,
    )


def _noticed_late(disk: TierCost, rates: Rates) -> TierCost:
    """Add the training that silent errors among the disk's failures cost until they are noticed."""
    if not disk.failures_per_s:
        return disk
    late_s = rates.silent_per_s * rates.noticed_after_s
    return replace(disk, unnoticed_s=late_s / disk.failures_per_s)


def bounds_of(costs: Costs, goal: Goal, *, slots: int, sync: bool) -> Bounds:
    """Lower bounds from the machine, upper bounds from the limits.

    One persist in flight: a period is at least the time until durable (95th percentile), and with N
    pinned in flight its N-th part (PCcheck).  The time until durable is observed with N in flight,
    so it includes the sharing of the storage.  With fewer than three slots a snapshot has to wait
    for the persist as well.
    """
    flying = goal.pins.in_flight or 1
    said = "one" if flying == 1 else str(flying)
    memory_min = max(
        (costs.iteration_s, "one iteration"), (costs.copy_high_s, "snapshot time (one in flight)")
    )
    if costs.peers is not None:
        memory_min = max(memory_min, (costs.peers.send_high_s, "time to peers (one in flight)"))
    disk_min = (costs.iteration_s, "one iteration")
    if not sync:
        durable = (costs.persist_high_s / flying, f"time until durable ({said} in flight)")
        disk_min = max(disk_min, durable)
        if slots < 3:
            memory_min = max(memory_min, (costs.persist_high_s, f"{slots} slots"))
    disk_max = (LONGEST_S, "one day")
    if goal.limits.lost_time_s is not None:
        disk_max = (goal.limits.lost_time_s - costs.persist_s, "limits.lost_time")
    return Bounds(
        memory_min_s=memory_min,
        disk_min_s=disk_min,
        disk_max_s=disk_max,
        overhead=goal.limits.overhead,
    )


def choose_intervals(
    costs: Costs, rates: Rates, goal: Goal, *, memory_on: bool, slots: int, sync: bool
) -> Intervals:
    """Intervals of both tiers in whole iterations.

    Raises ConfigError where pins and limits contradict each other, naming the nearest way out.
    """
    tiers = tiers_of(costs, rates, memory_on=memory_on)
    bounds = bounds_of(costs, goal, slots=slots, sync=sync)
    if bounds.disk_max_s[0] <= 0:
        raise ConfigError(_no_room(tiers, bounds, costs))
    pins = pinned_steps(costs, goal, memory_on=memory_on)
    stretch = {"goodput": 1.0, "stall": FLAT, "durability": 1.0 / FLAT}[goal.objective]
    if any(pins):
        pairs = _pinned_pairs(tiers, bounds, *pins, stretch=stretch)
        if goal.pins.disk_interval_s and not pins[0] and tiers.memory is not None:
            pairs += _nested_near(tiers, bounds, pins[1])
        binding = " and ".join(
            name
            for name, pin in zip(("memory.interval", "disk.interval"), pins, strict=True)
            if pin
        )
    elif goal.pins.interval_rule == "checkfreq":
        steps = _checkfreq(costs, tiers, goal)
        pairs, binding = [(steps if memory_on else 0, steps)], "rule checkfreq"
    else:
        pairs, binding = free_pairs(tiers, bounds, stretch=stretch)
    allowed = [pair for pair in pairs if not _broken(tiers, bounds, pair)]
    if not allowed:
        raise ConfigError(_contradiction(tiers, bounds, goal, costs, pairs, binding))
    return _intervals(tiers, allowed, binding)


def pinned_steps(costs: Costs, goal: Goal, *, memory_on: bool) -> tuple[int, int]:
    """Pinned intervals (memory, disk) in iterations, 0 where free; seconds are rounded."""
    pins = goal.pins
    memory = _steps(pins.memory_interval_steps, pins.memory_interval_s, costs) if memory_on else 0
    disk = _steps(pins.disk_interval_steps, pins.disk_interval_s, costs)
    if not memory or disk % memory == 0:
        return memory, disk
    if pins.disk_interval_steps and not pins.memory_interval_steps:
        return min(divisors(disk), key=lambda k: abs(math.log(k / memory))), disk
    if pins.memory_interval_steps and pins.disk_interval_steps:
        raise ConfigError(interval_conflict(memory, disk))
    return memory, max(1, round(disk / memory)) * memory


def divisors(count: int) -> list[int]:
    """All divisors of `count`, smallest first."""
    low = [k for k in range(1, math.isqrt(count) + 1) if count % k == 0]
    return sorted({*low, *(count // k for k in low)})


def _steps(steps: int | None, seconds: float | None, costs: Costs) -> int:
    if seconds:
        return max(1, round(seconds / costs.iteration_s))
    return steps or 0


def _pinned_pairs(
    tiers: Tiers, bounds: Bounds, memory: int, disk: int, *, stretch: float
) -> list[tuple[int, int]]:
    if disk and (memory or tiers.memory is None):
        return [(memory, disk)]
    if memory:
        return multiples(tiers, bounds, memory, stretch=stretch)
    least_s = bounds.memory_min_s[0]
    roomy = [k for k in divisors(disk) if tiers.periods_s(k, disk)[0] >= least_s]
    return [(k, disk) for k in roomy or [disk]]


def _nested_near(tiers: Tiers, bounds: Bounds, disk: int) -> list[tuple[int, int]]:
    """Nested pairs whose disk interval is `disk` iterations to within `NEAR`.

    Seconds are rounded to iterations anyway, and that number may be a prime.
    """
    best_s = max(optimum_s(tiers)[0], bounds.memory_min_s[0])
    ratio = disk * tiers.iteration_s / best_s
    ratios = {max(1, round(ratio * factor)) for factor in (0.8, 0.9, 1.0, 1.1, 1.25)}
    steps = {
        max(1, math.floor(disk / n) + up) for n in ratios | set(range(1, FEW)) for up in (0, 1)
    }
    roomy = [k for k in sorted(steps) if tiers.periods_s(k, disk)[0] >= bounds.memory_min_s[0]]
    pairs = [(k, max(1, round(disk / k)) * k) for k in roomy]
    return [pair for pair in pairs if abs(pair[1] - disk) <= NEAR * disk]


def _checkfreq(costs: Costs, tiers: Tiers, goal: Goal) -> int:
    return checkfreq_steps(
        iteration_s=costs.iteration_s,
        snapshot_s=costs.copy_s,
        persist_s=max(0.0, costs.persist_s - costs.copy_s),
        overhead_s=tiers.cost_s(1),
        budget=goal.limits.overhead or CHECKFREQ_BUDGET,
    )


def _broken(tiers: Tiers, bounds: Bounds, pair: tuple[int, int]) -> list[str]:
    """Names of the limits that a pair of intervals exceeds."""
    broken = []
    parts = tiers.waste(*pair)
    if bounds.overhead is not None and parts.checkpoint > bounds.overhead * (1 + 1e-9):
        broken.append("limits.overhead")
    limited = bounds.disk_max_s[1] == "limits.lost_time"
    if limited and tiers.periods_s(*pair)[1] > bounds.disk_max_s[0] + 1e-9:
        broken.append("limits.lost_time")
    return broken


def _intervals(tiers: Tiers, allowed: list[tuple[int, int]], binding: str) -> Intervals:
    ranked = sorted(allowed, key=lambda pair: tiers.tunable(*pair))
    limit = tiers.tunable(*ranked[0]) * (1.0 + TIE)
    chosen = max((p for p in ranked if tiers.tunable(*p) <= limit), key=lambda p: (p[1], p[0]))
    runner_up = next((pair for pair in ranked if pair != chosen), None)
    memory_s, disk_s = tiers.periods_s(*chosen)
    optimum_memory_s, optimum_disk_s = optimum_s(tiers)
    return Intervals(
        memory_steps=chosen[0],
        disk_steps=chosen[1],
        memory_period_s=memory_s,
        disk_period_s=disk_s,
        waste=tiers.waste(*chosen),
        optimum_memory_s=optimum_memory_s if tiers.memory is not None else 0.0,
        optimum_disk_s=optimum_disk_s,
        binding=binding,
        runner_up=runner_up,
        runner_up_waste=tiers.waste(*runner_up).total if runner_up else None,
    )


def _contradiction(
    tiers: Tiers,
    bounds: Bounds,
    goal: Goal,
    costs: Costs,
    pairs: list[tuple[int, int]],
    binding: str,
) -> str:
    """Which limits cannot hold together, and the nearest values that can."""
    if not pairs:
        return _no_room(tiers, bounds, costs)
    pair = min(pairs, key=lambda p: tiers.tunable(*p))
    parts, (_, disk_s) = tiers.waste(*pair), tiers.periods_s(*pair)
    what = f"{binding} ({pair[0]} steps to memory, {pair[1]} steps to disk)"
    broken = _broken(tiers, bounds, pair)
    said = []
    if "limits.lost_time" in broken and goal.limits.lost_time_s is not None:
        said.append(
            f"may lose {format_duration(disk_s + costs.persist_s)} of work, and limits.lost_time "
            f"is {format_duration(goal.limits.lost_time_s)}; nearest: limits.lost_time "
            f"{_up(disk_s + costs.persist_s)} or disk.interval "
            f"{max(0, math.floor(pair[1] * bounds.disk_max_s[0] / disk_s))} steps"
        )
    if "limits.overhead" in broken and bounds.overhead is not None:
        longer = math.ceil(pair[1] * parts.checkpoint / bounds.overhead)
        said.append(
            f"costs {format_fraction(parts.checkpoint)} of training time, and limits.overhead is "
            f"{format_fraction(bounds.overhead)}; nearest: limits.overhead "
            f"{format_fraction(parts.checkpoint * 1.01)} or intervals of {longer} steps"
        )
    return f"{what} " + "; and it ".join(said)


def _no_room(tiers: Tiers, bounds: Bounds, costs: Costs) -> str:
    lowest_s, why = bounds.lowest(tiers, 1)
    highest_s = max(0.0, bounds.disk_max_s[0])
    cost_s, iteration_s = tiers.cost_s(1), tiers.iteration_s
    least = max(1, math.ceil((lowest_s - cost_s) / iteration_s))
    need_s = least * iteration_s + cost_s + costs.persist_s
    message = (
        f"no interval fits: {why} asks for at least {format_duration(lowest_s)} between disk "
        f"checkpoints, which are durable {format_duration(costs.persist_s)} after their boundary, "
        f"and {bounds.disk_max_s[1]} leaves {format_duration(highest_s)}; "
        f"nearest: limits.lost_time {_up(need_s)}"
    )
    most = math.floor((highest_s - cost_s) / iteration_s)
    if why == "limits.overhead" and most >= 1:
        need = cost_s / (most * iteration_s + cost_s)
        message += f" or limits.overhead {format_fraction(need * 1.01)}"
    return message


def _up(seconds: float) -> str:
    """A duration that is safely enough and can be pasted into a policy file."""
    return format_duration(math.ceil(seconds * 1.01) if seconds >= 1 else seconds * 1.01)
