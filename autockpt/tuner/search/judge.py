"""Who wins: the default, unless another was better in interleaved writes by more than their spread.

Finalists and default take turns, so that a slow minute slows all of them.  The logarithm of each
time is modelled as candidate + round + noise.  The noise of all of them together gives the spread
of a difference (two-way layout, (k - 1)(n - 1) degrees of freedom).  The leader wins if its plan
would still lose less time than the default's when its writes were slower by

    max(3 %, exp(t sqrt(2 / n) s))        t: quantile of Student's distribution, below

Samples of the search are not used again: the best of many noisy ones looks better than it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autockpt.tuner.search.model import Model, Rating
from autockpt.tuner.search.record import Trial
from autockpt.tuner.search.space import Candidate
from autockpt.values.units import format_duration, format_fraction

LEAST_ADVANTAGE = 1.03
"""A path must be 3 % faster than the default, else the default stays."""
UNSURE = math.inf
"""Spread of a single round: nothing beats the default."""
_T = (
    *(19.08, 5.34, 3.74, 3.19, 2.91, 2.75, 2.64, 2.57, 2.51, 2.47),
    *(2.43, 2.40, 2.38, 2.36, 2.34),
)
"""Quantiles of Student's t for 1 to 15 degrees of freedom at 1 - 0.05 / 3.  The leader is the best
of three challengers; all three together may be wrong in 5 of 100 searches (Bonferroni)."""
_T_BEYOND = 2.34


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A candidate of the final."""

    candidate: Candidate
    seconds: tuple[float, ...]
    """One a round."""
    ratio: float
    """Its time over the default's, geometric mean of the rounds."""
    extra_cpu: float
    """CPU seconds beyond the default's, in seconds of the default's write."""
    rating: Rating


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The winner and why."""

    winner: Candidate
    rating: Rating
    kept_default: bool
    reason: str
    margin: float
    """Factor by which a time must differ to count: spread of the rounds, at least 3 %."""
    contenders: tuple[Contender, ...]
    """Best first."""
    tied: tuple[Candidate, ...] = ()
    """Contenders that might be as good as the winner, within the margin."""


def judge(model: Model, finals: Sequence[Trial]) -> Verdict:
    """The winner of the final rounds; `finals` holds trials of stage `final` in their order."""
    default = model.space.default
    times = complete_rounds(finals)
    if default not in times:
        return _undecided(model, "the default was not measured in a whole round")
    cpu_s = _cpu_seconds(finals)
    rated = [_contender(model, name, times, cpu_s) for name in times]
    contenders = tuple(sorted(rated, key=lambda c: (c.rating.waste, c.ratio, str(c.candidate))))
    margin = max(LEAST_ADVANTAGE, noise_factor(list(times.values())))
    own = next(c for c in contenders if c.candidate == default)
    leader = contenders[0]
    wins = leader is not own and _holds(model, leader, own, margin)
    chosen = leader if wins else own
    return Verdict(
        winner=chosen.candidate,
        rating=chosen.rating,
        kept_default=not wins,
        reason=_reason(chosen, leader, own, margin),
        margin=margin,
        contenders=contenders,
        tied=tuple(
            c.candidate
            for c in contenders
            if c is not chosen and not _behind(model, c, chosen, margin)
        ),
    )


def _holds(model: Model, leader: Contender, own: Contender, margin: float) -> bool:
    """Whether the leader would still lose less time if its writes were slower by the margin."""
    if not math.isfinite(margin):
        return False
    slower = model.rate(leader.candidate, leader.ratio * margin, extra_cpu=leader.extra_cpu)
    return slower.waste < own.rating.waste


def complete_rounds(finals: Sequence[Trial]) -> dict[Candidate, tuple[float, ...]]:
    """Seconds by candidate, of the rounds in which all were measured; failed ones are out."""
    failed = {t.candidate for t in finals if t.failure}
    times: dict[Candidate, list[float]] = {}
    for trial in finals:
        if trial.candidate not in failed:
            times.setdefault(trial.candidate, []).append(trial.seconds)
    rounds = min(map(len, times.values()), default=0)
    return {name: tuple(values[:rounds]) for name, values in times.items()}


def noise_factor(rows: Sequence[Sequence[float]]) -> float:
    """exp(t sqrt(2 / n) s) of a two-way layout; infinite for one round or one contender."""
    k, n = len(rows), len(rows[0])
    if k < 2 or n < 2:
        return UNSURE
    logs = [[math.log(value) for value in row] for row in rows]
    by_row = [sum(row) / n for row in logs]
    by_round = [sum(row[i] for row in logs) / k for i in range(n)]
    grand = sum(by_row) / k
    squares = sum(
        (logs[r][i] - by_row[r] - by_round[i] + grand) ** 2 for r in range(k) for i in range(n)
    )
    free = (k - 1) * (n - 1)
    t = _T[free - 1] if free <= len(_T) else _T_BEYOND
    return math.exp(min(700.0, t * math.sqrt(2.0 / n * squares / free)))


def _contender(
    model: Model,
    candidate: Candidate,
    times: Mapping[Candidate, Sequence[float]],
    cpu_s: Mapping[Candidate, float],
) -> Contender:
    default = model.space.default
    pairs = zip(times[candidate], times[default], strict=True)
    logs = [math.log(own / base) for own, base in pairs]
    ratio = math.exp(sum(logs) / len(logs))
    extra_cpu = (cpu_s[candidate] - cpu_s[default]) / _mean(times[default])
    return Contender(
        candidate=candidate,
        seconds=tuple(times[candidate]),
        ratio=ratio,
        extra_cpu=extra_cpu,
        rating=model.rate(candidate, ratio, extra_cpu=extra_cpu),
    )


def _cpu_seconds(finals: Sequence[Trial]) -> dict[Candidate, float]:
    """Mean of each candidate's writes."""
    by: dict[Candidate, list[float]] = {}
    for trial in finals:
        by.setdefault(trial.candidate, []).append(trial.cpu_s)
    return {name: _mean(group) for name, group in by.items()}


def _behind(model: Model, other: Contender, chosen: Contender, margin: float) -> bool:
    """Whether `other` would lose more time than the winner even if it were faster by the margin."""
    faster = model.rate(other.candidate, other.ratio / margin, extra_cpu=other.extra_cpu)
    return faster.waste > chosen.rating.waste


def _undecided(model: Model, why: str) -> Verdict:
    default = model.space.default
    return Verdict(
        winner=default,
        rating=model.rate(default, 1.0),
        kept_default=True,
        reason=f"the default stays: {why}",
        margin=UNSURE,
        contenders=(),
    )


def _reason(chosen: Contender, leader: Contender, own: Contender, margin: float) -> str:
    rounds = len(own.seconds)
    beyond = f"{format_fraction(margin - 1)} that count as noise in {rounds} rounds"
    if rounds < 2:
        beyond = "unknown spread of one round"
    if chosen is leader and leader is not own:
        return (
            f"{leader.candidate} took {leader.ratio:.2f} times as long as the default "
            f"({own.candidate}) in {rounds} interleaved rounds and {leader.extra_cpu:+.2f} CPU "
            f"seconds a second of it: lost time {format_fraction(leader.rating.waste)} instead of "
            f"{format_fraction(own.rating.waste)}, more than the {beyond}"
        )
    if leader is own:
        return f"the default ({own.candidate}) loses least of the {rounds} rounds' contenders"
    return (
        f"the default ({own.candidate}) stays: {leader.candidate} took "
        f"{format_duration(_mean(leader.seconds))} against {format_duration(_mean(own.seconds))}, "
        f"{leader.ratio:.2f} times as long, which is within the {beyond} or saves no time"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
