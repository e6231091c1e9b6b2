"""Which setting of a decision costs least, from checkpoints that took turns.

    cost = wall time of the iterations beside a checkpoint - as many quiet ones
           + weight x time until durable

Overlap can cost more than waiting, so nothing is believed before it was measured.  A setting takes
the place of the expected best only when it is better by more than noise.  That noise is of the
differences between neighbours, so no drift of the machine is part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autockpt.tuner.online.estimates import WINDOW, Window, winsorised
from autockpt.values.telemetry import SettingMeasured
from autockpt.values.units import format_duration

ROUNDS = 8
"""Checkpoints of each setting before it is judged, unless the decision has another number."""
CLEAR_ROUNDS, CLEAR = 2, 2.0
"""After so many checkpoints of each, one of which every checkpoint cost this much less wins."""
GIVEN_UP = 3
"""Times as many of another one, and a setting that was hardly ever tried cannot be used here."""
SIGMAS = 2.0
"""Standard errors by which a setting must be better than the one expected to be best."""
DOUBTED = 2.0
"""Times more or less than it was meant to that a checkpoint costs: settings are compared anew."""
WORTH = 1e-3
"""Fraction of time that the larger of both must take: less is not worth a comparison."""
AGAIN = 2 * ROUNDS
"""Checkpoints from one comparison until its cost may begin another."""
KEPT = 3 * GIVEN_UP * ROUNDS
"""Newest tries that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingCost:
    """The observed cost of a checkpoint under one setting."""

    setting: str
    cost_s: float
    """Mean training time lost; below 0 is noise."""
    error_s: float
    """Standard error of the mean, infinite for a single one."""
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The end of a comparison."""

    winner: str
    costs: tuple[SettingCost, ...]
    """Of each setting that could be tried, the one expected to be best first."""

    def sentence(self, subject: str) -> str:
        """The costs in words; `subject`: a snapshot, a checkpoint to disk."""
        seen = ", ".join(
            f"{cost.setting} {format_duration(max(0.0, cost.cost_s))} ({cost.tries} tries)"
            for cost in self.costs
        )
        return f"{subject} costs training {seen}; {self.winner} it is"

    @property
    def numbers(self) -> dict[str, float]:
        """For the decision."""
        found = {f"{cost.setting}_observed_s": cost.cost_s for cost in self.costs}
        return {**found, **{f"{c.setting}_tries": float(c.tries) for c in self.costs}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The newest comparison of a decision, once it has ended."""

    settings: tuple[str, ...]
    """The winner first."""
    checkpoints: int
    """Of the run, when it ended."""
    quiet_s: float
    """Quiet iteration then."""
    cost_s: float = 0.0
    """The winner's own cost since then; 0: not known yet."""


def setting_costs(
    rivals: Sequence[str],
    tried: Sequence[SettingMeasured],
    quiet_s: float,
    *,
    weight: float = 0.0,
) -> tuple[SettingCost, ...]:
    """Return the cost of each setting; settings that were never tried are left out.

    `quiet_s`: an iteration without a checkpoint; 0: none was seen, the quickest tried one counts.
    """
    samples = {name: _costs_s(name, tried, quiet_s, weight) for name in rivals}
    return tuple(
        SettingCost(setting=name, cost_s=mean, error_s=error, tries=len(samples[name]))
        for name in rivals
        if samples[name]
        for mean, error in (winsorised(samples[name]),)
    )


def compare(
    rivals: Sequence[str],
    tried: Sequence[SettingMeasured],
    quiet_s: float,
    *,
    weight: float = 0.0,
    rounds: int = ROUNDS,
    early: bool = False,
) -> Comparison | None:
    """The verdict; None while too little was tried.

    `rivals`: the expected best first.  `early`: a clear difference needs no more rounds.
    """
    samples = {name: _costs_s(name, tried, quiet_s, weight) for name in rivals}
    most = max(map(len, samples.values()))
    clear = _clear_winner(samples) if early else ""
    if clear:
        return Comparison(winner=clear, costs=setting_costs(rivals, tried, quiet_s, weight=weight))
    usable = [name for name in rivals if len(samples[name]) >= rounds]
    if not usable or (len(usable) < len(rivals) and most < GIVEN_UP * rounds):
        return None
    means = {name: winsorised(samples[name])[0] for name in usable}
    winner = usable[0]
    for name in sorted(usable, key=lambda name: means[name]):
        pairs = zip(samples[usable[0]], samples[name], strict=False)
        better_s, error_s = winsorised([first - this for first, this in pairs])
        if better_s > SIGMAS * error_s:
            winner = name
            break
    costs = setting_costs(usable, tried, quiet_s, weight=weight)
    return Comparison(winner=winner, costs=costs)


def _clear_winner(samples: Mapping[str, Sequence[float]]) -> str:
    """The setting that needs no more rounds, "" while there is none."""
    if min(map(len, samples.values())) < CLEAR_ROUNDS:
        return ""
    best = min(samples, key=lambda name: max(samples[name]))
    others = min(min(found) for name, found in samples.items() if name != best)
    return best if 0 < CLEAR * max(samples[best]) <= others else ""


def is_doubted(cost: Window, meant_s: float, *, least_s: float) -> bool:
    """Whether a cost asks for a comparison: it is clear, not as it was meant, and at least that."""
    if cost.n < WINDOW or cost.doubtful or meant_s <= 0:
        return False
    high, low = max(cost.mean, meant_s), min(cost.mean, meant_s)
    return high >= DOUBTED * low and high >= least_s


def _costs_s(
    setting: str, tried: Sequence[SettingMeasured], quiet_s: float, weight: float
) -> tuple[float, ...]:
    base_s = quiet_s or min((t.total_s / t.iterations for t in tried), default=0.0)
    return tuple(
        t.total_s - t.iterations * base_s + weight * t.durable_s
        for t in tried
        if t.setting == setting
    )
