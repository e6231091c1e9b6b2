"""The one number that decides: the waste rate, the fraction of time lost.

    w = 1 - (1 - c) e^(-f)
    c = sum_i (s_i + sigma_i P_i) / T_i        f = sum_i Lambda_i (T_i / 2 + P_i + s_i + D + R_i)

for the tiers i of a plan: memory serves failures that this node's memory survives, disk the rest.
For each tier, s_i is the stall, T_i the period, Lambda_i the failures per second and R_i the
restore.  The checkpoint becomes recoverable after P_i, in which interference costs sigma_i P_i of
training time.  D is the time to detect and restart.

c is paid in all the time that is not lost at failures; so is the time b at each iteration boundary.
A failure may also strike while the job
recovers from the last one, hence the product.  It is c + f where both are small, and never above 1.

Source: docs/concepts/policy.md, "The waste rate"; the exact form of one level is in `renewal`.
"""

import math
from dataclasses import dataclass

from autockpt.values.decision_inputs import TierCost

ENVELOPE = 0.4
"""Waste up to which the form is within 1 % of time of the simulator (a test)."""


LARGEST_EXPONENT = 700.0
"""A larger one overflows a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteParts:
    """The losses, each as if it were alone; fractions of time that `total` combines."""

    stall: float
    slowdown: float
    lost_memory: float
    """Work trained twice after failures served from memory."""
    lost_disk: float
    restart: float
    """Detection and restart of processes."""
    restore: float
    boundary: float = 0.0
    """At iteration boundaries, the same for all intervals."""

    @property
    def checkpoint(self) -> float:
        """The part without any failure that intervals decide on, and limits bound."""
        return self.stall + self.slowdown

    @property
    def paid(self) -> float:
        """Lost without any failure."""
        return self.checkpoint + self.boundary

    @property
    def failure(self) -> float:
        """Paid at failures."""
        return self.lost_memory + self.lost_disk + self.restart + self.restore

    @property
    def total(self) -> float:
        """w, 0..1; less than the sum, because time is lost once only."""
        return fraction_lost(self.paid, self.failure)

    @property
    def productive(self) -> float:
        """(1 - c) e^(-f), 0..1."""
        return 1.0 - self.total


def fraction_lost(checkpoint: float, failure: float) -> float:
    """w of c = `checkpoint`, the fraction of undisturbed time, and f = `failure`, as above."""
    return 1.0 - max(0.0, 1.0 - checkpoint) * math.exp(-failure)


def gain(now: WasteParts, then: WasteParts) -> float:
    """The fraction by which training is faster under `then`; below 0 where it is slower.

    Of the productive time and not of all time.  A job that loses nearly all of it has a waste near
    1 at any interval.  One interval may still train twice as much as another.
    """
    left, promised = 1.0 - now.paid, 1.0 - then.paid
    if left <= 0.0 or promised <= 0.0:
        return float(promised > 0.0) - float(left > 0.0)
    return 1.0 - left / promised * math.exp(min(then.failure - now.failure, LARGEST_EXPONENT))


def waste(
    *,
    memory: TierCost | None,
    disk: TierCost,
    memory_period_s: float,
    disk_period_s: float,
    boundary: float = 0.0,
) -> WasteParts:
    """Waste rate of a two-tier plan; periods in seconds from one checkpoint to the next.

    `memory` None: the tier is off, and `disk` must carry all failures.  `boundary`: fraction of
    time at iteration boundaries.
    """
    tiers = [(disk, disk_period_s)] + ([(memory, memory_period_s)] if memory is not None else [])
    return WasteParts(
        stall=sum(tier.stall_s / period for tier, period in tiers),
        slowdown=sum(tier.slowdown_s / period for tier, period in tiers),
        lost_memory=0.0 if memory is None else _lost(memory, memory_period_s),
        lost_disk=_lost(disk, disk_period_s),
        restart=sum(tier.failures_per_s * tier.restart_s for tier, _ in tiers),
        restore=sum(tier.failures_per_s * tier.restore_s for tier, _ in tiers),
        boundary=boundary,
    )


def step_periods_s(
    *,
    memory: TierCost | None,
    disk: TierCost,
    iteration_s: float,
    memory_steps: int,
    disk_steps: int,
) -> tuple[float, float]:
    """Periods (s) of memory and disk for intervals in iterations, their own cost included.

    A disk period holds `disk_steps` iterations, one disk checkpoint, and a memory checkpoint each
    `memory_steps`.  With the memory tier off both are the disk's.
    """
    disk_period_s = disk_steps * iteration_s + disk.exposed_s
    if memory is None:
        return disk_period_s, disk_period_s
    snapshots = disk_steps / memory_steps
    disk_period_s += snapshots * memory.exposed_s
    return disk_period_s / snapshots, disk_period_s


def _lost(tier: TierCost, period_s: float) -> float:
    return tier.failures_per_s * (period_s / 2.0 + tier.latency_s + tier.unnoticed_s)
