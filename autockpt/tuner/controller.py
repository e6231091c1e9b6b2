"""The online controller: tell it what happened, ask it whether the plan should change.

    observe(event) ...  propose(now, step) -> a proposal or None  ->  all ranks apply  ->
    observe(PlanChanged)  ->  watch  ->  keep or roll back

Asking changes nothing, so a proposal that was not applied may simply be asked for again; the same
events and questions give the same proposals.  A change passes gates that make it rare: predicted
gain, dead-band, dwell, no save under way.  Emergencies pass fewer.

Source: docs/policy.md, "Online re-tuning".
"""

import math
from dataclasses import dataclass, replace

from autockpt.policies.costs import Costs
from autockpt.policies.frequency import Intervals
from autockpt.tuner.observed import Observed
from autockpt.tuner.outlook import Outlook
from autockpt.tuner.proposals import (
    Kind,
    PlanProposal,
    intervals_of,
    scaled,
    with_intervals,
    written,
)
from autockpt.tuner.settings import ControllerSettings
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan
from autockpt.values.profile import FailureRates, RecoveryTimes
from autockpt.values.telemetry import Event, PlanChanged
from autockpt.values.units import format_duration, format_fraction

OFFERS = 8
"""Proposals that may still be applied: the newest ones since the last change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """The last applied change, for the watch window."""

    before: CheckpointPlan
    at_s: float
    sealed: int
    quiet_s: float
    quiet_error_s: float
    expected_waste: float | None


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
        self._offers: list[PlanProposal] = []
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
        if isinstance(event, PlanChanged) and event.plan_version > self.plan.version:
            self._applied(event)
        if self.seen.sealed > sealed:
            self._count_overhead()
            self._end_watch()
        if len(self.seen.lost) > lost:
            self._count_failure()

    def expect(self, plan: CheckpointPlan, *, expected_waste: float | None = None) -> None:
        """A plan that somebody else decided and offers to all ranks, e.g. from a whole profile."""
        self._offer(
            PlanProposal(
                plan=plan, kind="first", reason="decided elsewhere", expected_waste=expected_waste
            )
        )

    def _offer(self, proposal: PlanProposal) -> None:
        if proposal not in self._offers:
            self._offers = [*self._offers, proposal][-OFFERS:]

    def _offered(self, event: PlanChanged) -> PlanProposal:
        """The offer that was applied; one of our own making for a plan nobody offered here."""
        steps = (event.memory_interval_steps, event.disk_interval_steps)
        for offer in reversed(self._offers):
            if offer.plan.version == event.plan_version and intervals_of(offer.plan) == steps:
                return offer
        plan = replace(with_intervals(self.plan, *steps), version=event.plan_version)
        return PlanProposal(plan=plan, kind="foreign", reason=event.reason)

    def _applied(self, event: PlanChanged) -> None:
        offered = self._offered(event)
        self._change = _Change(
            before=self.plan,
            at_s=event.at_s,
            sealed=self.seen.sealed,
            quiet_s=self.seen.quiet.mean,
            quiet_error_s=self.seen.quiet.error,
            expected_waste=offered.expected_waste,
        )
        self._watching = offered.kind in ("first", "retune")
        if offered.kind == "rollback":
            self._patience = min(8.0, self._patience * 2.0)
        self._hurried_from = intervals_of(self.plan) if offered.kind == "hurry" else None
        self.plan, self._offers, self._over_budget = offered.plan, [], 0
        self.seen.settle()

    def _end_watch(self) -> None:
        """A change is judged once its window is full, and then left alone."""
        if self._change is not None:
            watched = self.seen.sealed - self._change.sealed
            self._watching = self._watching and watched < self.settings.watch_checkpoints + 2

    def _count_overhead(self) -> None:
        """Consecutive checkpoints that cost more than twice what is allowed."""
        times = self.seen.seals_s
        if len(times) < 2 or times[-1] <= times[-2]:
            return
        outlook = self.outlook
        memory, disk = intervals_of(self.plan)
        mean_s = outlook.tiers.cost_s(max(1, disk // memory) if memory else 1)
        cost_s = mean_s - outlook.costs.stall_s + self.seen.stall.samples[-1]
        over = cost_s / (times[-1] - times[-2]) > 2.0 * self._budget()
        self._over_budget = self._over_budget + 1 if over else 0

    def _budget(self) -> float:
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

    @property
    def outlook(self) -> Outlook:
        """The plan in force under today's estimates."""
        return Outlook(seen=self.seen, goal=self.goal, plan=self.plan)

    def propose(self, now_s: float, step: int) -> PlanProposal | None:
        """A better plan, if there is one worth the change now; `step` is named in the reason."""
        if not self.plan.retune or self.goal.pins.retune is False or not self._ready():
            return None
        found = (
            self._first(step)
            or self._back_off(step)
            or self._hurry(now_s, step)
            or self._rollback(now_s, step)
            or self._retune(now_s, step)
        )
        if found is not None:
            self._offer(found)
        return found

    def _ready(self) -> bool:
        least = self.settings.observe_only_checkpoints
        known = self.seen.prior is not None or self.seen.persisted >= least
        enough = self.seen.sealed >= least and known
        return enough and self.seen.iteration_s > 0 and intervals_of(self.plan)[1] > 0

    def _first(self, step: int) -> PlanProposal | None:
        """The safe default plan gives way to the first measured one, without gates but the band."""
        best = self._best() if self.plan.version == 0 else None
        if best is None or self._in_dead_band(best):
            return None
        return self._to(best, "first", f"first measured plan, step {step}")

    def _back_off(self, step: int) -> PlanProposal | None:
        if self._over_budget < 3 or self.outlook.pinned:
            return None
        longer = scaled(intervals_of(self.plan), self.settings.back_off)
        if self.outlook.too_old(longer):
            return None
        why = (
            f"step {step}: three checkpoints in a row cost more than twice the budget of "
            f"{format_fraction(self._budget())}"
        )
        return self._proposal("back-off", longer, why)

    def _hurry(self, now_s: float, step: int) -> PlanProposal | None:
        """Shorter intervals during a burst of failures, and back after it."""
        burst = now_s < self._hurry_until_s
        if burst and self._hurried_from is None and not self.outlook.pinned:
            shorter = scaled(intervals_of(self.plan), 1.0 / self.settings.back_off)
            shorter = self.outlook.bounded(shorter)
            if shorter[1] >= intervals_of(self.plan)[1]:
                return None
            why = (
                f"step {step}: two failures within one interval, shorter for "
                f"{format_duration(self.settings.hurry_s)}"
            )
            return self._proposal("hurry", shorter, why)
        if not burst and self._hurried_from is not None:
            return self._proposal("calm", self._hurried_from, f"step {step}: the burst is over")
        return None

    def _rollback(self, now_s: float, step: int) -> PlanProposal | None:
        """Undo a change that turned out worse than it promised."""
        change = self._change
        if change is None or not self._watching or self._saving(now_s):
            return None
        if self.seen.sealed - change.sealed < self.settings.watch_checkpoints:
            return None
        why = self._slower(change) or self._worse(change)
        back = intervals_of(change.before)
        if not why or self.outlook.too_old(back):
            return None
        return self._proposal("rollback", back, f"step {step}: {why}")

    def _slower(self, change: _Change) -> str:
        quiet = self.seen.quiet
        if not change.quiet_s or quiet.n < 2:
            return ""
        longer = quiet.mean / change.quiet_s - 1.0
        error = math.hypot(quiet.error, change.quiet_error_s) / change.quiet_s
        if longer <= max(self.settings.rollback_slowdown, self.settings.rollback_sigmas * error):
            return ""
        return f"iterations became {format_fraction(longer)} longer with the change"

    def _worse(self, change: _Change) -> str:
        if change.expected_waste is None:
            return ""
        outlook = self.outlook
        before = replace(outlook, plan=change.before).waste
        allowed = change.expected_waste + self.settings.rollback_sigmas * outlook.waste_error()
        if outlook.waste <= allowed or before >= outlook.waste:
            return ""
        return (
            f"waste is {format_fraction(outlook.waste)} where "
            f"{format_fraction(change.expected_waste)} was expected, and the plan before would "
            f"have {format_fraction(before)}"
        )

    def _retune(self, now_s: float, step: int) -> PlanProposal | None:
        outlook = self.outlook
        urgent = outlook.too_old(intervals_of(self.plan))
        blocked = self._hurried_from is not None or self._saving(now_s) or not self._dwelt(now_s)
        if blocked and not urgent:
            return None
        best = self._best()
        if best is None or not (urgent or self._too_costly() or self._worth(best)):
            return None
        return self._to(best, "retune", f"step {step}")

    def _too_costly(self) -> bool:
        """Checkpoints cost more than the limit and its dead-band."""
        limit = self.goal.limits.overhead
        parts = self.outlook.tiers.waste(*intervals_of(self.plan))
        return limit is not None and parts.checkpoint > limit * self.settings.dead_band

    def _worth(self, best: Intervals) -> bool:
        """The gain is outside the dead-band, more than nothing and more than noise."""
        gain = self.outlook.waste - best.waste.total
        noise = self.settings.gain_sigmas * self.outlook.gain_error(best)
        return gain >= max(self.settings.gain_floor, noise) and not self._in_dead_band(best)

    # --- gates

    def _saving(self, now_s: float) -> bool:
        """A save is under way; ignored where one nearly always is, or nothing could change."""
        disk_s = self.outlook.tiers.periods_s(*intervals_of(self.plan))[1]
        return self.seen.busy_saving(now_s) and self.seen.persist.mean < disk_s / 2.0

    def _dwelt(self, now_s: float) -> bool:
        """Long enough since the last change, or a cost has jumped since."""
        settings = self.settings
        if self.seen.jumped and self.seen.stall.n >= settings.observe_only_checkpoints:
            return True
        since_s = self._change.at_s if self._change is not None else self.seen.first_s
        sealed = self._change.sealed if self._change is not None else 0
        dwell_s = settings.dwell_s
        if settings.run_s is not None:
            dwell_s = min(dwell_s, settings.dwell_fraction * settings.run_s)
        long_enough = since_s is not None and now_s - since_s >= dwell_s * self._patience
        return long_enough and self.seen.sealed - sealed >= settings.dwell_checkpoints

    def _in_dead_band(self, best: Intervals) -> bool:
        """The plan wastes no more than intervals `dead_band` times off the best would."""
        band, tiers = self.settings.dead_band, self.outlook.tiers
        allowed = (band + 1.0 / band) / 2.0
        now = tiers.tunable(*intervals_of(self.plan))
        return now <= allowed * tiers.tunable(best.memory_steps, best.disk_steps)

    # --- proposals

    def _best(self) -> Intervals | None:
        """The best intervals now; None (and `obstacle`) if the limits cannot be kept."""
        try:
            best = self.outlook.best()
        except ConfigError as error:
            self.obstacle = str(error)
            return None
        self.obstacle = ""
        return best

    def _to(self, best: Intervals, kind: Kind, when: str) -> PlanProposal:
        costs = self.outlook.costs
        why = f"{when}: {self.outlook.sentence()}"
        if best.binding:
            why += f"; {best.binding} decides"
        numbers = {
            "stall_s": costs.stall_s,
            "persist_s": costs.persist_s,
            "failures_per_s": self.outlook.rates.total_per_s,
            "waste_before": self.outlook.waste,
        }
        then = (best.memory_steps, best.disk_steps)
        return self._proposal(kind, then, why, numbers=numbers, expected=best.waste.total)

    def _proposal(
        self,
        kind: Kind,
        intervals: tuple[int, int],
        why: str,
        *,
        numbers: dict[str, float] | None = None,
        expected: float | None = None,
    ) -> PlanProposal:
        change = f"intervals {written(intervals_of(self.plan))} -> {written(intervals)}"
        if expected is not None:
            change += f", expected waste {format_fraction(expected)}"
        return PlanProposal(
            plan=with_intervals(self.plan, *intervals),
            kind=kind,
            reason=f"{why}; {change}",
            numbers=numbers or {},
            expected_waste=expected,
        )
