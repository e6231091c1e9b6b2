"""The plan in force, seen with today's estimates: what it costs, and what would be best."""

import math
from dataclasses import dataclass

from autockpt.policies.costs import Costs
from autockpt.policies.expectation import split_rates
from autockpt.policies.frequency import Intervals, Rates, choose_intervals, tiers_of
from autockpt.policies.nesting import Tiers
from autockpt.tuner.observed import Observed
from autockpt.tuner.proposals import intervals_of
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan
from autockpt.values.units import format_duration, format_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Estimates, goal and plan together; every property is computed anew."""

    seen: Observed
    goal: Goal
    plan: CheckpointPlan

    @property
    def sync(self) -> bool:
        """Training waits for the disk."""
        return self.plan.staging.persist == "sync"

    @property
    def memory_on(self) -> bool:
        """The memory tier is on."""
        return self.plan.tier("memory").interval_steps > 0

    @property
    def costs(self) -> Costs:
        """Of one checkpoint."""
        return self.seen.costs(sync=self.sync)

    @property
    def rates(self) -> Rates:
        """Of interruptions, the declared ones if the goal declares them."""
        return split_rates(self.seen.rates(), self.goal)

    @property
    def tiers(self) -> Tiers:
        """Costs and rates by tier."""
        return tiers_of(self.costs, self.rates, memory_on=self.memory_on)

    @property
    def waste(self) -> float:
        """Of the plan in force."""
        return self.tiers.waste(*intervals_of(self.plan)).total

    @property
    def pinned(self) -> bool:
        """The user fixed an interval, so emergencies must not move it."""
        pins = self.goal.pins
        every = (pins.memory_interval_s, pins.memory_interval_steps)
        return any(
            pin is not None for pin in (*every, pins.disk_interval_s, pins.disk_interval_steps)
        )

    def best(self) -> Intervals:
        """The best intervals now.  Raises ConfigError if the limits cannot be kept."""
        return choose_intervals(
            self.costs,
            self.rates,
            self.goal,
            memory_on=self.memory_on,
            slots=self.plan.slots,
            sync=self.sync,
        )

    def too_old(self, intervals: tuple[int, int]) -> bool:
        """Whether a failure could cost more work than limits.lost_time allows."""
        limit_s = self.goal.limits.lost_time_s
        disk_s = self.tiers.periods_s(*intervals)[1]
        return limit_s is not None and disk_s + self.costs.persist_s > limit_s * (1 + 1e-9)

    def bounded(self, intervals: tuple[int, int]) -> tuple[int, int]:
        """The intervals, but not shorter than one save takes."""
        costs, (memory, disk) = self.costs, intervals
        apart_s = costs.persist_high_s / (self.goal.pins.in_flight or 1)
        least = max(1, math.ceil(apart_s / costs.iteration_s))
        if not memory:
            return 0, max(disk, least)
        memory = max(memory, math.ceil(costs.copy_high_s / costs.iteration_s))
        if not disk:
            return memory, 0
        return memory, memory * max(round(disk / memory), math.ceil(least / memory))

    def gain_error(self, best: Intervals) -> float:
        """Standard error of the gain: d gain / d cost = 1 / T_now - 1 / T_best, per tier."""
        now = self.tiers.periods_s(*intervals_of(self.plan))
        then = (best.memory_period_s, best.disk_period_s)
        errors = self.seen.cost_errors_s()
        return math.hypot(*(e * (1 / a - 1 / b) for e, a, b in zip(errors, now, then, strict=True)))

    def waste_error(self) -> float:
        """Standard error of the waste of the plan in force, from the errors of its costs."""
        periods = self.tiers.periods_s(*intervals_of(self.plan))
        errors = self.seen.cost_errors_s()
        return math.hypot(*(e / period for e, period in zip(errors, periods, strict=True)))

    def sentence(self) -> str:
        """The numbers behind a proposal."""
        costs, rate = self.costs, self.rates.total_per_s
        mtbf = format_duration(1.0 / rate) if rate > 0 else "never"
        return (
            f"a snapshot stalls {format_duration(costs.stall_s)} (mean of {self.seen.stall.n}), a "
            f"persist takes {format_duration(costs.persist_s)} and slows training by "
            f"{format_duration(costs.persist_slowdown_s)}, failures come every {mtbf}, "
            f"waste is {format_fraction(self.waste)}"
        )
