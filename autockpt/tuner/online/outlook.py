"""The plan in force under today's estimates: its cost, and the best alternative."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from autockpt.policies.cost_model.costs import Costs, PeerCosts
from autockpt.policies.cost_model.expectation import promise, split_rates
from autockpt.policies.cost_model.inputs import inputs_of
from autockpt.policies.cost_model.waste import WasteParts
from autockpt.policies.interval.choose import Intervals, Rates, choose_intervals, tiers_of
from autockpt.policies.interval.nesting import Tiers
from autockpt.tuner.online.observed import KNOWN, Observed
from autockpt.tuner.online.proposals import intervals_of
from autockpt.values.decision_inputs import DecisionInputs
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan, Expected
from autockpt.values.units import format_duration, format_fraction


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Estimates, goal and plan together; good until the next event is observed."""

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
    def intervals(self) -> tuple[int, int]:
        """(memory, disk) of the plan, in iterations."""
        return intervals_of(self.plan)

    @cached_property
    def costs(self) -> Costs:
        """Of one checkpoint; what peers serve counts while the plan has any."""
        costs = self.seen.costs(sync=self.sync)
        shared = self.plan.redundancy.scheme != "none"
        return costs if shared or costs.peers is None else replace(costs, peers=None)

    @cached_property
    def rates(self) -> Rates:
        """Of interruptions, the declared ones if the goal declares them."""
        return split_rates(self.seen.rates(), self.goal, self.seen.recovered)

    @cached_property
    def tiers(self) -> Tiers:
        """Costs and rates by tier."""
        return tiers_of(self.costs, self.rates, memory_on=self.memory_on)

    @property
    def periods_s(self) -> tuple[float, float]:
        """From one checkpoint to the next, memory and disk, under the plan in force."""
        return self.tiers.periods_s(*self.intervals)

    @cached_property
    def parts(self) -> WasteParts:
        """Waste of the plan in force, by cause."""
        return self.tiers.waste(*self.intervals)

    @property
    def waste(self) -> float:
        """Of the plan in force."""
        return self.parts.total

    @property
    def overhead(self) -> float:
        """The part of it that is paid without any failure."""
        return self.parts.checkpoint

    @property
    def pinned(self) -> bool:
        """The user fixed an interval, so emergencies must not move it."""
        pins = self.goal.pins
        every = (pins.memory_interval_s, pins.memory_interval_steps)
        return any(
            pin is not None for pin in (*every, pins.disk_interval_s, pins.disk_interval_steps)
        )

    def best(self, *, overhead_aim: float = 1.0) -> Intervals:
        """The best intervals now, at `overhead_aim` of limits.overhead where there is room for it.

        Raises ConfigError if the limits cannot be kept.
        """
        limit = self.goal.limits.overhead
        if limit is not None and overhead_aim < 1.0:
            limits = replace(self.goal.limits, overhead=limit * overhead_aim)
            try:
                return self._best(replace(self.goal, limits=limits))
            except ConfigError:
                pass
        return self._best(self.goal)

    def _best(self, goal: Goal) -> Intervals:
        return choose_intervals(
            self.costs,
            self.rates,
            goal,
            memory_on=self.memory_on,
            slots=self.plan.slots,
            sync=self.sync,
        )

    def waste_with(self, peers: PeerCosts) -> WasteParts | None:
        """Of the best intervals with this exchange; None: the limits leave none."""
        costs = replace(self.costs, peers=peers)
        try:
            return choose_intervals(
                costs, self.rates, self.goal, memory_on=self.memory_on, slots=self.plan.slots,
                sync=self.sync,
            ).waste  # fmt: skip
        except ConfigError:
            return None

    def promised(self, pair: tuple[int, int]) -> Expected:
        """Return the promise of these intervals."""
        memory_s, disk_s = self.tiers.periods_s(*pair)
        intervals = Intervals(
            memory_steps=pair[0],
            disk_steps=pair[1],
            memory_period_s=memory_s,
            disk_period_s=disk_s,
            waste=self.tiers.waste(*pair),
            optimum_memory_s=0.0,
            optimum_disk_s=0.0,
            binding="",
        )
        seen = self.seen
        return promise(
            self.costs, seen.rates(), seen.recovered, self.goal, intervals, memory_on=self.memory_on
        )

    def inputs(self) -> DecisionInputs:
        """Return the inputs of a decision now."""
        seen = self.seen
        return inputs_of(
            self.costs, seen.rates(), seen.recovered, self.goal, memory_on=self.memory_on
        )

    def too_old(self, intervals: tuple[int, int]) -> bool:
        """Whether a failure could cost more work than limits.lost_time allows."""
        limit_s = self.goal.limits.lost_time_s
        disk_s = self.tiers.periods_s(*intervals)[1]
        return limit_s is not None and disk_s + self.costs.persist_s > limit_s * (1 + 1e-9)

    def breaks_limit(self, intervals: tuple[int, int]) -> bool:
        """Whether they cost more work or more time than the limits allow."""
        overhead, limit = self.tiers.waste(*intervals).checkpoint, self.goal.limits.overhead
        return self.too_old(intervals) or (limit is not None and overhead > limit)

    @property
    def crowded(self) -> bool:
        """Checkpoints come due faster than storage takes them, so that some are skipped."""
        flying = self.goal.pins.in_flight or 1
        return not self.sync and self.costs.persist_s > self.periods_s[1] * flying

    def bounded(self, intervals: tuple[int, int]) -> tuple[int, int]:
        """The intervals, but not shorter than one save takes."""
        costs, (memory, disk) = self.costs, intervals
        apart_s = costs.persist_high_s / (self.goal.pins.in_flight or 1)
        least = max(1, math.ceil(apart_s / costs.iteration_s))
        if not memory:
            return 0, max(disk, least)
        least_s = max(costs.copy_high_s, costs.peers.send_high_s if costs.peers else 0.0)
        memory = max(memory, math.ceil(least_s / costs.iteration_s))
        if not disk:
            return memory, 0
        return memory, memory * max(round(disk / memory), math.ceil(least / memory))

    def gain_error(self, best: Intervals) -> float:
        """Standard error of the gain: d gain / d cost = 1 / T_now - 1 / T_best, per tier."""
        then = (best.memory_period_s, best.disk_period_s)
        errors = self.seen.cost_errors_s(sync=self.sync)
        pairs = zip(errors, self.periods_s, then, strict=True)
        return math.hypot(*(e * (1 / a - 1 / b) for e, a, b in pairs))

    def waste_error(self) -> float:
        """Standard error of the waste of the plan in force, from the errors of its costs."""
        errors = self.seen.cost_errors_s(sync=self.sync)
        return math.hypot(*(e / period for e, period in zip(errors, self.periods_s, strict=True)))

    def sentence(self) -> str:
        """The numbers behind a proposal."""
        costs, rate = self.costs, self.rates.total_per_s
        mtbf = format_duration(1.0 / rate) if rate > 0 else "never"
        slows = f"slows training by {format_duration(costs.persist_slowdown_s)}"
        if self.sync:
            slows = f"holds it for {format_duration(costs.blocked_s)}"
        n = self.seen.stall.n
        seen = f"mean of {n}" if n >= KNOWN or self.seen.prior is None else "by the profile"
        return (
            f"a snapshot stalls {format_duration(costs.stall_s)} ({seen}), a "
            f"persist takes {format_duration(costs.persist_s)} and {slows}, "
            f"failures come every {mtbf}, waste is {format_fraction(self.waste)}"
        )
