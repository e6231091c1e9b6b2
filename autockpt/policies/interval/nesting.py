"""Whole, nested iterations: the formula's periods cut by bounds and rounded for two tiers.

The disk interval is a multiple of the memory interval, because a disk checkpoint persists a
snapshot that is taken anyway.  With n snapshots for each persist the two tiers are one tier with

    cost c(n) = c_m + c_d / n        rate Lambda(n) = Lambda_m + n Lambda_d        period T(n).

n is chosen first, with T(n) still a real number.  It depends on costs and on the mix of failures,
but not on how often they strike.  A changed failure rate therefore moves both intervals the same
way.
"""

import math
from dataclasses import dataclass

from autockpt.policies.cost_model.waste import WasteParts, step_periods_s, waste
from autockpt.policies.interval.closed_forms import best_period_s, ordered_periods_s
from autockpt.values.decision_inputs import TierCost

REFINE = 1e-2
"""Another multiple than the best real-valued one must save this part of the tunable waste."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Costs and rates of the tiers that are on, and the waste of any pair of intervals."""

    iteration_s: float
    memory: TierCost | None
    disk: TierCost
    boundary_s: float = 0.0
    """Training blocked at each iteration boundary, also without a checkpoint."""

    def cost_s(self, snapshots: int) -> float:
        """c(n): training time per snapshot when every n-th is persisted."""
        memory_s = self.memory.exposed_s if self.memory is not None else 0.0
        return memory_s + self.disk.exposed_s / snapshots

    def rate_per_s(self, snapshots: int) -> float:
        """Lambda(n)."""
        memory = self.memory.failures_per_s if self.memory is not None else 0.0
        return memory + snapshots * self.disk.failures_per_s

    def periods_s(self, memory_steps: int, disk_steps: int) -> tuple[float, float]:
        """Seconds from one checkpoint to the next, memory and disk."""
        return step_periods_s(
            memory=self.memory,
            disk=self.disk,
            iteration_s=self.iteration_s + self.boundary_s,
            memory_steps=memory_steps or disk_steps,
            disk_steps=disk_steps,
        )

    def waste(self, memory_steps: int, disk_steps: int) -> WasteParts:
        """Waste rate with these intervals, in iterations."""
        memory_s, disk_s = self.periods_s(memory_steps, disk_steps)
        return waste(
            memory=self.memory, disk=self.disk, memory_period_s=memory_s, disk_period_s=disk_s,
            boundary=self.boundary_s * disk_steps / disk_s,
        )  # fmt: skip

    def tunable(self, memory_steps: int, disk_steps: int) -> float:
        """The part of the waste that depends on the intervals."""
        memory_s, disk_s = self.periods_s(memory_steps, disk_steps)
        result = self.disk.exposed_s / disk_s + self.disk.failures_per_s * disk_s / 2.0
        if self.memory is not None:
            result += self.memory.exposed_s / memory_s
            result += self.memory.failures_per_s * memory_s / 2.0
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of the formula's periods: seconds, each with the name of its cause."""

    memory_min_s: tuple[float, str]
    disk_min_s: tuple[float, str]
    disk_max_s: tuple[float, str]
    overhead: float | None
    """Largest fraction of time for checkpoints."""

    def lowest(self, tiers: Tiers, snapshots: int) -> tuple[float, str]:
        """Shortest allowed snapshot period when every n-th is persisted."""
        disk_s, disk_name = self.disk_min_s
        lowest = max(self.memory_min_s, (disk_s / snapshots, disk_name))
        if self.overhead is None:
            return lowest
        return max(lowest, (tiers.cost_s(snapshots) / self.overhead, "limits.overhead"))

    def highest(self, snapshots: int) -> tuple[float, str]:
        """Longest allowed snapshot period when every n-th is persisted."""
        return self.disk_max_s[0] / snapshots, self.disk_max_s[1]

    def most_snapshots(self, tiers: Tiers) -> int:
        """Largest n that the bounds leave room for, at least 1."""
        disk_max_s = self.disk_max_s[0]
        most = disk_max_s / self.memory_min_s[0]
        memory_s = tiers.memory.exposed_s if tiers.memory is not None else 0.0
        if self.overhead is not None and memory_s > 0:
            most = min(most, (self.overhead * disk_max_s - tiers.disk.exposed_s) / memory_s)
        return max(1, math.floor(most))


def optimum_s(tiers: Tiers) -> tuple[float, float]:
    """The formula's periods (memory, disk); with memory off, disk's twice."""
    disk = tiers.disk
    if tiers.memory is None:
        period_s = best_period_s(disk.exposed_s, disk.failures_per_s)
        return period_s, period_s
    memory_s, disk_s = ordered_periods_s(
        (tiers.memory.exposed_s, disk.exposed_s),
        (tiers.memory.failures_per_s, disk.failures_per_s),
    )
    return memory_s, disk_s


def free_pairs(
    tiers: Tiers, bounds: Bounds, *, stretch: float
) -> tuple[list[tuple[int, int]], str]:
    """Nested pairs (memory, disk) of iterations around the cut formula, and what cut it.

    `stretch` multiplies the formula's periods.  Empty if the bounds leave no room.
    """
    if tiers.memory is None:
        period_s, binding = _cut(tiers, bounds, 1, stretch)
        return [(0, steps) for steps in _around(tiers, bounds, 1, period_s)], binding
    best = _best_ratio(tiers, bounds, stretch)
    for snapshots in (best, bounds.most_snapshots(tiers), 1):
        period_s, binding = _cut(tiers, bounds, snapshots, stretch)
        steps = _around(tiers, bounds, snapshots, period_s)
        if steps:
            pairs = [(k, k * snapshots) for k in steps]
            return pairs + _refined(tiers, bounds, pairs, stretch), binding
    return [], ""


def multiples(
    tiers: Tiers, bounds: Bounds, memory_steps: int, *, stretch: float
) -> list[tuple[int, int]]:
    """Pairs with this memory interval and the disk intervals around the cut formula."""
    disk_s = optimum_s(tiers)[1] * stretch
    period_s = tiers.periods_s(memory_steps, memory_steps)[0] - tiers.disk.exposed_s
    least = math.ceil(bounds.disk_min_s[0] / period_s)
    most = max(1, math.floor(bounds.disk_max_s[0] / period_s))
    if bounds.overhead is not None:
        memory_s = tiers.memory.exposed_s if tiers.memory is not None else 0.0
        left_s = bounds.overhead * period_s - memory_s
        least = max(least, math.ceil(tiers.disk.exposed_s / left_s) if left_s > 0 else most)
    target = min(most, disk_s / period_s)
    around = {math.floor(target), math.ceil(target)}
    return [(memory_steps, memory_steps * n) for n in sorted({max(1, least, n) for n in around})]


def _best_ratio(tiers: Tiers, bounds: Bounds, stretch: float) -> int:
    memory_s, disk_s = (period * stretch for period in optimum_s(tiers))
    disk_s = min(max(disk_s, bounds.disk_min_s[0]), bounds.disk_max_s[0])
    memory_s = min(max(memory_s, bounds.memory_min_s[0]), disk_s)
    most = bounds.most_snapshots(tiers)
    ratio = math.floor(disk_s / memory_s) if memory_s > 0 else 1
    ratios = {max(1, min(n, most)) for n in range(ratio - 1, ratio + 3)}

    def relaxed(snapshots: int) -> float:
        period_s, _ = _cut(tiers, bounds, snapshots, stretch)
        return tiers.cost_s(snapshots) / period_s + tiers.rate_per_s(snapshots) * period_s / 2.0

    return min(sorted(ratios), key=relaxed)


def _cut(tiers: Tiers, bounds: Bounds, snapshots: int, stretch: float) -> tuple[float, str]:
    """T(n) within the bounds, and the name of the bound that cut it."""
    period_s = best_period_s(tiers.cost_s(snapshots), tiers.rate_per_s(snapshots)) * stretch
    lowest, highest = bounds.lowest(tiers, snapshots), bounds.highest(snapshots)
    if period_s > highest[0]:
        return highest
    return lowest if period_s < lowest[0] else (period_s, "")


def _around(tiers: Tiers, bounds: Bounds, snapshots: int, period_s: float) -> list[int]:
    """Floor and ceiling of a snapshot period in iterations, inside the bounds."""
    cost_s = tiers.cost_s(snapshots)

    def steps(period: float) -> float:
        return (period - cost_s) / tiers.iteration_s

    least = max(1, math.ceil(steps(bounds.lowest(tiers, snapshots)[0]) - 1e-9))
    most = math.floor(steps(bounds.highest(snapshots)[0]) + 1e-9)
    if most < least:
        return []
    target = steps(period_s)
    return sorted({min(max(n, least), most) for n in (math.floor(target), math.ceil(target))})


def _refined(
    tiers: Tiers, bounds: Bounds, pairs: list[tuple[int, int]], stretch: float
) -> list[tuple[int, int]]:
    """Other multiples of the same memory intervals, where rounding left something to gain."""
    best = min(tiers.tunable(*pair) for pair in pairs)
    others = [pair for k, _ in pairs for pair in multiples(tiers, bounds, k, stretch=stretch)]
    return [
        pair
        for pair in others
        if pair not in pairs and tiers.tunable(*pair) < best * (1.0 - REFINE)
    ]
