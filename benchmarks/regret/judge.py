"""Chosen plans against the best of all plans, on the same failures.

Two grids: a coarse one over everything that the bounds allow, then a fine one around its winner.
The winner is judged twice.  On the failures that it was found on it has had luck, the more the more
rivals it beat (hindsight: an upper bound of the regret); on fresh failures it has not (foresight).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.regret import scenarios as sc
from benchmarks.regret.sweep import Bools, Floats, column, columns, waste

COARSE, FINE = 1.35, 1.06
"""Ratios of neighbours: half a step off costs 1.1 % and 0.04 % of the tunable waste."""
CAUTIOUS = 5
"""Failures after which rates that were unknown are judged."""
BATCH = 50
"""Scenarios that are simulated together, to stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One scenario; every waste is a fraction of time on the same failures."""

    scenario: sc.Scenario
    best: sc.Plan
    tunable: float
    """Waste of the best plan that intervals decide, closed form."""
    hindsight: float
    """Waste of the best plan on the failures that it was found on."""
    foresight: float
    """The same on fresh failures."""
    known: tuple[float, float]
    """Waste of the plan that is chosen with the true rates: on the same, on fresh failures."""
    learned: float
    """Of the one that is chosen after `CAUTIOUS` failures; fresh failures."""
    prior: float
    """Of the one that is chosen before any failure; fresh failures."""
    default: float
    """Of the plan that nobody decided; fresh failures."""
    habit: float
    """Of a blocking save every 30 minutes; fresh failures."""


def judge(count: int, *, failures: int, seed: int) -> list[Verdict]:
    """`count` random scenarios, judged over that many failures each."""
    chance = np.random.default_rng(seed)
    drawn = [sc.draw(chance) for _ in range(count)]
    found = []
    for start in range(0, count, BATCH):
        found += _batch(drawn[start : start + BATCH], failures, chance)
    return found


def _batch(
    batch: Sequence[sc.Scenario], failures: int, chance: np.random.Generator
) -> list[Verdict]:
    history = _failures(batch, failures, chance)
    fresh = _failures(batch, failures, chance)
    first = _failures(batch, CAUTIOUS, chance)
    few = max(1, failures // 10)
    short = history[0][:, :few], history[1][:, :few]
    coarse = _best([sc.every_plan(one, ratio=COARSE) for one in batch], *short)
    rivals = [
        sc.near(one, plan, within=COARSE * FINE, ratio=FINE)
        for one, (plan, _) in zip(batch, coarse, strict=True)
    ]
    known = [(one.tiers, *sc.chosen(one, one.rates)) for one in batch]
    best = _best([[*some, own] for some, own in zip(rivals, known, strict=True)], *history)
    learned = [
        (one.tiers, *sc.chosen(one, sc.learned(one, gaps_s, alive)))
        for one, gaps_s, alive in zip(batch, *first, strict=True)
    ]
    prior = [
        (one.tiers, *sc.chosen(one, sc.learned(one, first[0][0][:0], first[1][0][:0])))
        for one in batch
    ]
    others = (known, learned, prior, [sc.default(one) for one in batch], list(map(sc.habit, batch)))
    on_fresh = _wastes([[plan for plan, _ in best], *others], *fresh)
    on_same = _wastes([known], *history)[0]
    return [
        Verdict(
            scenario=one,
            best=plan,
            tunable=plan[0].tunable(*plan[1:]),
            hindsight=hindsight,
            foresight=float(on_fresh[0][i]),
            known=(float(on_same[i]), float(on_fresh[1][i])),
            learned=float(on_fresh[2][i]),
            prior=float(on_fresh[3][i]),
            default=float(on_fresh[4][i]),
            habit=float(on_fresh[5][i]),
        )
        for i, (one, (plan, hindsight)) in enumerate(zip(batch, best, strict=True))
    ]


def _failures(
    batch: Sequence[sc.Scenario], count: int, chance: np.random.Generator
) -> tuple[Floats, Bools]:
    """Gaps (s) and whether memory survives, [scenarios, count]."""
    total = np.array([one.rates.total_per_s for one in batch])[:, None]
    share = np.array([one.rates.memory_per_s for one in batch])[:, None] / total
    shape = (len(batch), count)
    return chance.exponential(1.0, shape) / total, chance.random(shape) < share


def _best(
    plans: Sequence[Sequence[sc.Plan]], gaps_s: Floats, alive: Bools
) -> list[tuple[sc.Plan, float]]:
    """The plan of each scenario that wastes least, and its waste."""
    rows = [column(i, *plan) for i, some in enumerate(plans) for plan in some]
    wasted = np.split(
        waste(columns(rows), gaps_s, alive), np.cumsum([len(some) for some in plans])[:-1]
    )
    winners = [int(one.argmin()) for one in wasted]
    return [(some[k], float(one[k])) for some, one, k in zip(plans, wasted, winners, strict=True)]


def _wastes(plans: Sequence[Sequence[sc.Plan]], gaps_s: Floats, alive: Bools) -> list[Floats]:
    """Waste of one plan for each scenario, for each of several rules."""
    rows = [column(i, *plan) for some in plans for i, plan in enumerate(some)]
    return np.split(waste(columns(rows), gaps_s, alive), len(plans))
