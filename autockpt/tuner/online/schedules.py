"""Which schedule of copying costs least, from snapshots that took turns.

cost = wall time of the iterations beside a snapshot - as many quiet ones.  Overlap can cost more
than waiting, so it is not believed before it was measured; a schedule takes the place of the one
that was expected to be best only when it is better by more than the noise of the differences
between neighbours, which no drift of the machine is part of.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.tuner.online.estimates import WINDOW, Window, winsorised
from autockpt.values.goal import Goal
from autockpt.values.plan import Schedule, Staging
from autockpt.values.telemetry import ScheduleMeasured
from autockpt.values.units import format_duration

ROUNDS = 8
"""Snapshots of each schedule before it is judged."""
GIVEN_UP = 3 * ROUNDS
"""So many of another one, and a schedule that was hardly ever tried cannot be used in this run."""
SIGMAS = 2.0
"""Standard errors by which a schedule must be better than the one expected to be best."""
DOUBTED = 2.0
"""Times more or less than it was meant to that a snapshot stalls: schedules are compared anew."""
WORTH = 1e-3
"""Fraction of time that the larger of both must take: less is not worth a comparison."""
AGAIN = 2 * ROUNDS
"""Snapshots from one comparison until the stall may begin another."""
KEPT = 3 * GIVEN_UP
"""Newest tries that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCost:
    """What a snapshot under one schedule was seen to cost."""

    schedule: Schedule
    cost_s: float
    """Mean training time lost, stall included; below 0 is noise."""
    error_s: float
    """Standard error of the mean, infinite for a single one."""
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The end of a comparison."""

    winner: Schedule
    costs: tuple[ScheduleCost, ...]
    """Of each schedule that could be tried, the one expected to be best first."""

    @property
    def sentence(self) -> str:
        """What was seen."""
        seen = ", ".join(
            f"{cost.schedule} {format_duration(max(0.0, cost.cost_s))} ({cost.tries} tries)"
            for cost in self.costs
        )
        return f"a snapshot was seen to cost {seen}: {self.winner}"

    @property
    def numbers(self) -> dict[str, float]:
        """For the decision."""
        found = {f"{cost.schedule}_observed_s": cost.cost_s for cost in self.costs}
        return {**found, **{f"{c.schedule}_tries": float(c.tries) for c in self.costs}}


def schedule_costs(
    rivals: Sequence[Schedule], tried: Sequence[ScheduleMeasured], quiet_s: float
) -> tuple[ScheduleCost, ...]:
    """What each schedule cost, those that were never tried left out.

    `quiet_s`: an iteration without a snapshot; 0: none was seen, the quickest tried one counts.
    """
    samples = {name: _costs_s(name, tried, quiet_s) for name in rivals}
    return tuple(
        ScheduleCost(schedule=name, cost_s=mean, error_s=error, tries=len(samples[name]))
        for name in rivals
        if samples[name]
        for mean, error in (winsorised(samples[name]),)
    )


def compare(
    rivals: Sequence[Schedule], tried: Sequence[ScheduleMeasured], quiet_s: float
) -> Comparison | None:
    """The verdict; None while too little was tried.  `rivals`: the expected best first."""
    samples = {name: _costs_s(name, tried, quiet_s) for name in rivals}
    most = max(map(len, samples.values()))
    usable = [name for name in rivals if len(samples[name]) >= ROUNDS]
    if not usable or (len(usable) < len(rivals) and most < GIVEN_UP):
        return None
    means = {name: winsorised(samples[name])[0] for name in usable}
    winner = usable[0]
    for name in sorted(usable, key=lambda name: means[name]):
        pairs = zip(samples[usable[0]], samples[name], strict=False)
        better_s, error_s = winsorised([first - this for first, this in pairs])
        if better_s > SIGMAS * error_s:
            winner = name
            break
    costs = schedule_costs(usable, tried, quiet_s)
    return Comparison(winner=winner, costs=costs)


def rivals_of(staging: Staging, goal: Goal) -> tuple[Schedule, ...]:
    """The schedule of a plan and the other that any job can use; () where it may not change."""
    fixed = goal.pins.schedule is not None or goal.objective == "stall"
    if fixed or staging.persist == "sync" or staging.schedule == "windows":
        return ()
    return ("lazy", "blocking") if staging.schedule == "lazy" else ("blocking", "lazy")


def doubt(stall: Window, meant_s: float, period_s: float) -> str:
    """Why the stall asks for a comparison; "" where it is as it was meant to be, or negligible."""
    if stall.n < WINDOW or stall.doubtful or meant_s <= 0:
        return ""
    high, low = max(stall.mean, meant_s), min(stall.mean, meant_s)
    if high < DOUBTED * low or high < WORTH * period_s:
        return ""
    return (
        f"a snapshot stalls {format_duration(stall.mean)} (mean of {stall.n}) where "
        f"{format_duration(meant_s)} was expected"
    )


def _costs_s(
    schedule: Schedule, tried: Sequence[ScheduleMeasured], quiet_s: float
) -> tuple[float, ...]:
    base_s = quiet_s or min((t.total_s / t.iterations for t in tried), default=0.0)
    return tuple(t.total_s - t.iterations * base_s for t in tried if t.schedule == schedule)
