"""The online controller: tell it what happened, ask it whether the plan should change.

    observe(event) ...  propose(now, step) -> a proposal or None  ->  all ranks apply  ->
    observe(PlanChanged)  ->  watch  ->  keep or roll back

Asking changes nothing, so a proposal that was not applied may simply be asked for again, and a log of
events replayed into a new controller gives the same proposals.  Every change passes gates that make
it rare: predicted gain, dead-band, dwell, no save under way.  Emergencies pass fewer.

Source: docs/policy.md, "Online re-tuning".
"""

import math
from dataclasses import dataclass

from autockpt.policies.costs import Costs
from autockpt.policies.expectation import split_rates
from autockpt.policies.frequency import Intervals, Rates, choose_intervals, tiers_of
from autockpt.policies.nesting import Tiers
from autockpt.tuner.observed import Observed
from autockpt.tuner.proposals import (
    Kind,
    PlanProposal,
    intervals_of,
    scaled,
    with_intervals,
    written,
)
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan
from autockpt.values.profile import FailureRates, RecoveryTimes
from autockpt.values.telemetry import Event, MemoryCommitted, PlanChanged
from autockpt.values.units import format_duration, format_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Constants of the control loop; the defaults were chosen by simulation (docs/policy.md)."""

    observe_only_checkpoints: int = 3
    """Real checkpoints before the first proposal."""
    gain_floor: float = 0.001
    """A change must save this fraction of time,"""
    gain_sigmas: float = 2.0
    """and this many standard errors of the gain."""
    dead_band: float = 1.25
    """Intervals within this factor of the best stay: they cost less than 2.5 % of the waste."""
    dwell_s: float = 3600.0
    """Least time between changes,"""
    run_s: float | None = None
    """or, when the length of the run is known,"""
    dwell_fraction: float = 0.05
    """this part of it if that is shorter;"""
    dwell_checkpoints: int = 8
    """and never fewer checkpoints than these."""
    watch_checkpoints: int = 8
    """A change is judged after this many."""
    rollback_sigmas: float = 3.0
    rollback_slowdown: float = 0.02
    """A quiet iteration longer by this fraction after a change undoes it."""
    budget: float = 0.05
    """Overhead that counts as meant when neither goal nor plan has a limit."""
    back_off: float = 1.5
    """Factor of the emergency steps."""
    hurry_s: float = 3600.0
    """How long a burst of failures keeps the intervals short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """The last applied change, for the watch window."""

    before: CheckpointPlan
    at_s: float
    sealed: int
    quiet_s: float
    expected_waste: float | None
    kind: str


class Controller:
    """Decides when the intervals of a running job change.  Pure: time comes as an argument."""

    def __init__(
        self,
        *,
        plan: CheckpointPlan,
        goal: Goal,
        failures: FailureRates,
        recovery: RecoveryTimes,
        prior: Costs | None = None,
        settings: ControllerSettings | None = None,
    ) -> None:
        """`prior`: costs from a profile, None for a run that starts without one."""
        self.plan = plan
        self.goal = goal
        self.settings = settings or ControllerSettings()
        self.seen = Observed(failures=failures, recovery=recovery, prior=prior)
        self.obstacle = ""
        """Why no interval satisfies the limits now, "" if one does; for the report."""
        self._offered: PlanProposal | None = None
        self._change: _Change | None = None
        self._watching = False
        self._patience = 1.0
        self._over_budget = 0
        self._hurry_until_s = -math.inf
        self._hurried_from: tuple[int, int] | None = None

    # --- tell

    def observe(self, event: Event) -> None:
        """Take in one event of this run, oldest first."""
        sealed, lost = self.seen.sealed, len(self.seen.lost)
        self.seen.observe(event)
        if isinstance(event, PlanChanged):
            self._applied(event)
        if isinstance(event, MemoryCommitted) and not self._to_be_persisted(event.step):
            self.seen.sealed_memory_only(event.generation)
        if self.seen.sealed > sealed:
            self._count_overhead()
        if len(self.seen.lost) > lost:
            self._count_failure()

    def _to_be_persisted(self, step: int) -> bool:
        disk = self.plan.tier("disk").interval_steps
        return bool(disk) and step % disk == 0

    def _applied(self, event: PlanChanged) -> None:
        offered = self._offered
        known = offered is not None and offered.plan.version == event.plan_version
        plan = offered.plan if offered is not None and known else None
        if plan is None:
            plan = with_intervals(self.plan, event.memory_interval_steps, event.disk_interval_steps)
        kind = offered.kind if offered is not None and known else "foreign"
        self._change = _Change(
            before=self.plan,
            at_s=event.at_s,
            sealed=self.seen.sealed,
            quiet_s=self.seen.quiet.mean,
            expected_waste=offered.expected_waste if offered is not None and known else None,
            kind=kind,
        )
        self._watching = kind in ("first", "retune")
        self._patience = min(8.0, self._patience * 2.0) if kind == "rollback" else self._patience
        if kind == "hurry":
            self._hurried_from = intervals_of(self.plan)
        elif kind in ("calm", "first", "retune"):
            self._hurried_from = None
        self.plan, self._offered, self._over_budget = plan, None, 0
        self.seen.settle()

    def _count_overhead(self) -> None:
        """Consecutive checkpoints that cost more than twice what is allowed."""
        times = self.seen.seals_s
        if len(times) < 2 or times[-1] <= times[-2]:
            return
        costs = self._costs()
        cost_s = self.seen.stall.samples[-1] + costs.copy_slowdown_s
        over = cost_s / (times[-1] - times[-2]) > 2.0 * self._budget(costs)
        self._over_budget = self._over_budget + 1 if over else 0

    def _budget(self, costs: Costs) -> float:
        limit = self.goal.limits.overhead or self.plan.overhead_budget
        if limit is not None:
            return limit
        meant = self._change.expected_waste if self._change is not None else None
        return max(self.settings.budget, meant or 0.0)

    def _count_failure(self) -> None:
        """Two failures within the interval that serves them mean a bad hour."""
        if len(self.seen.lost) < 2:
            return
        (before_s, _), (at_s, survived) = self.seen.lost[-2:]
        memory, disk = intervals_of(self.plan)
        steps = memory if survived and memory else disk
        if at_s - before_s < steps * self.seen.iteration_s:
            self._hurry_until_s = at_s + self.settings.hurry_s

    # --- ask

    def propose(self, now_s: float, step: int) -> PlanProposal | None:
        """A better plan, if there is one worth the change now.  `step` is named in the reason."""
        if not self.plan.retune or self.goal.pins.retune is False or not self._ready():
            return None
        if self.seen.busy_saving(now_s):
            return None
        self._offered = (
            self._first(step)
            or self._back_off(step)
            or self._hurry(now_s, step)
            or self._rollback(step)
            or self._retune(now_s, step)
        )
        return self._offered

    def _ready(self) -> bool:
        least = self.settings.observe_only_checkpoints
        persisted = self.seen.persisted >= least or not self.plan.tier("disk").interval_steps
        return self.seen.sealed >= least and persisted and self.seen.iteration_s > 0

    def _first(self, step: int) -> PlanProposal | None:
        """The safe default plan gives way to the first measured one, without dwell."""
        if self.plan.version != 0:
            return None
        best = self._best()
        if best is None or self._in_dead_band(best):
            return None
        return self._to(best, "first", f"after {self.seen.sealed} checkpoints at step {step}")

    def _back_off(self, step: int) -> PlanProposal | None:
        if self._over_budget < 3 or self._pinned():
            return None
        longer = scaled(intervals_of(self.plan), self.settings.back_off)
        limit_s = self.goal.limits.lost_time_s
        if limit_s is not None:
            costs, iteration_s = self._costs(), self.seen.iteration_s
            if longer[1] * iteration_s + costs.persist_s > limit_s:
                return None
        budget = format_fraction(self._budget(self._costs()))
        reason = (
            f"step {step}: three checkpoints in a row cost more than twice the budget of {budget}; "
            f"intervals {written(intervals_of(self.plan))} -> {written(longer)}"
        )
        return self._proposal("back-off", longer, reason)

    def _hurry(self, now_s: float, step: int) -> PlanProposal | None:
        """Shorter intervals during a burst of failures, and back after it."""
        if self._pinned():
            return None
        if now_s < self._hurry_until_s and self._hurried_from is None:
            shorter = self._bounded(scaled(intervals_of(self.plan), 1.0 / self.settings.back_off))
            if shorter == intervals_of(self.plan):
                return None
            reason = (
                f"step {step}: two failures within one interval; intervals "
                f"{written(intervals_of(self.plan))} -> {written(shorter)} for "
                f"{format_duration(self.settings.hurry_s)}"
            )
            return self._proposal("hurry", shorter, reason)
        if now_s >= self._hurry_until_s and self._hurried_from is not None:
            reason = (
                f"step {step}: no burst of failures any more; back to {written(self._hurried_from)}"
            )
            return self._proposal("calm", self._hurried_from, reason)
        return None

    def _rollback(self, step: int) -> PlanProposal | None:
        """Undo a change that turned out worse than it promised."""
        change = self._change
        if change is None or not self._watching:
            return None
        if self.seen.sealed - change.sealed < self.settings.watch_checkpoints:
            return None
        why = self._slower(change) or self._worse(change)
        if not why:
            return None
        back = intervals_of(change.before)
        reason = f"step {step}: {why}; back to {written(back)}"
        return self._proposal("rollback", back, reason)

    def _slower(self, change: _Change) -> str:
        quiet = self.seen.quiet
        if not change.quiet_s or quiet.n < 2:
            return ""
        longer = quiet.mean / change.quiet_s - 1.0
        noise = self.settings.rollback_sigmas * quiet.error / change.quiet_s
        if longer <= max(self.settings.rollback_slowdown, noise):
            return ""
        return f"iterations became {format_fraction(longer)} longer with the change"

    def _worse(self, change: _Change) -> str:
        if change.expected_waste is None:
            return ""
        tiers = self._tiers()
        measured = tiers.waste(*intervals_of(self.plan)).total
        before = tiers.waste(*intervals_of(change.before)).total
        allowed = change.expected_waste + self.settings.rollback_sigmas * self._waste_error(tiers)
        if measured <= allowed or before >= measured:
            return ""
        return (
            f"waste is {format_fraction(measured)} where {format_fraction(change.expected_waste)} "
            f"was expected, and {format_fraction(before)} with the plan before"
        )

    def _retune(self, now_s: float, step: int) -> PlanProposal | None:
        if self._hurried_from is not None or not self._dwelt(now_s):
            return None
        best = self._best()
        if best is None or self._in_dead_band(best):
            return None
        tiers = self._tiers()
        gain = tiers.waste(*intervals_of(self.plan)).total - best.waste.total
        needed = max(
            self.settings.gain_floor, self.settings.gain_sigmas * self._gain_error(tiers, best)
        )
        over = self.goal.limits.overhead
        breaks = over is not None and tiers.waste(*intervals_of(self.plan)).checkpoint > over
        if gain < needed and not breaks:
            return None
        return self._to(best, "retune", f"at step {step}")

    # --- gates and parts

    def _dwelt(self, now_s: float) -> bool:
        """Long enough since the last change, or a cost has jumped since."""
        settings = self.settings
        jumped = self.seen.jumped and self.seen.stall.n >= settings.observe_only_checkpoints
        if jumped:
            return True
        since_s = self._change.at_s if self._change is not None else self.seen.first_s
        sealed = self._change.sealed if self._change is not None else 0
        dwell_s = settings.dwell_s
        if settings.run_s is not None:
            dwell_s = min(dwell_s, settings.dwell_fraction * settings.run_s)
        long_enough = since_s is not None and now_s - since_s >= dwell_s * self._patience
        return long_enough and self.seen.sealed - sealed >= settings.dwell_checkpoints

    def _in_dead_band(self, best: Intervals) -> bool:
        band = self.settings.dead_band
        pairs = zip(intervals_of(self.plan), (best.memory_steps, best.disk_steps), strict=True)
        return all(not now or 1.0 / band <= new / now <= band for now, new in pairs)

    def _pinned(self) -> bool:
        pins = self.goal.pins
        return any(
            pin is not None
            for pin in (
                pins.memory_interval_s,
                pins.memory_interval_steps,
                pins.disk_interval_s,
                pins.disk_interval_steps,
            )
        )

    def _costs(self) -> Costs:
        return self.seen.costs(sync=self.plan.staging.persist == "sync")

    def _rates(self) -> Rates:
        return split_rates(self.seen.rates(), self.goal)

    def _tiers(self) -> Tiers:
        memory_on = self.plan.tier("memory").interval_steps > 0
        return tiers_of(self._costs(), self._rates(), memory_on=memory_on)

    def _best(self) -> Intervals | None:
        """The best intervals now; None (and `obstacle`) if the limits cannot be kept."""
        try:
            best = choose_intervals(
                self._costs(),
                self._rates(),
                self.goal,
                memory_on=self.plan.tier("memory").interval_steps > 0,
                slots=self.plan.slots,
                sync=self.plan.staging.persist == "sync",
            )
        except ConfigError as error:
            self.obstacle = str(error)
            return None
        self.obstacle = ""
        return best

    def _bounded(self, intervals: tuple[int, int]) -> tuple[int, int]:
        """Not shorter than one save takes."""
        costs = self._costs()
        memory, disk = intervals
        least = max(1, math.ceil(costs.persist_high_s / costs.iteration_s))
        if memory:
            memory = max(memory, math.ceil(costs.copy_high_s / costs.iteration_s))
            disk = memory * max(1, round(disk / memory), math.ceil(least / memory))
        return memory, max(disk, least) if disk and not memory else disk

    def _gain_error(self, tiers: Tiers, best: Intervals) -> float:
        """Standard error of the gain: d gain / d cost = 1 / T_now - 1 / T_best, per tier."""
        now = tiers.periods_s(*intervals_of(self.plan))
        then = (best.memory_period_s, best.disk_period_s)
        errors = self.seen.cost_errors_s()
        parts = (e * (1 / a - 1 / b) for e, a, b in zip(errors, now, then, strict=True))
        return math.sqrt(sum(part * part for part in parts))

    def _waste_error(self, tiers: Tiers) -> float:
        periods = tiers.periods_s(*intervals_of(self.plan))
        errors = self.seen.cost_errors_s()
        return math.sqrt(sum((e / period) ** 2 for e, period in zip(errors, periods, strict=True)))

    def _to(self, best: Intervals, kind: Kind, when: str) -> PlanProposal:
        tiers, now = self._tiers(), intervals_of(self.plan)
        then = (best.memory_steps, best.disk_steps)
        before = tiers.waste(*now).total
        rate = self._rates().total_per_s
        costs = self._costs()
        mtbf = format_duration(1.0 / rate) if rate > 0 else "never"
        reason = (
            f"{when} a snapshot stalls {format_duration(costs.stall_s)} (mean of "
            f"{self.seen.stall.n}), a persist slows training by "
            f"{format_duration(costs.persist_slowdown_s)} and failures come every {mtbf}: "
            f"intervals {written(now)} -> {written(then)}, waste {format_fraction(before)} -> "
            f"{format_fraction(best.waste.total)}"
        )
        if best.binding:
            reason += f" ({best.binding} decides)"
        numbers = {
            "stall_s": costs.stall_s,
            "persist_s": costs.persist_s,
            "failures_per_s": rate,
            "waste_before": before,
        }
        return self._proposal(kind, then, reason, numbers, best.waste.total)

    def _proposal(
        self,
        kind: Kind,
        intervals: tuple[int, int],
        reason: str,
        numbers: dict[str, float] | None = None,
        expected_waste: float | None = None,
    ) -> PlanProposal:
        return PlanProposal(
            plan=with_intervals(self.plan, *intervals),
            kind=kind,
            reason=reason,
            numbers=numbers or {},
            expected_waste=expected_waste,
        )
