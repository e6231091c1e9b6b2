"""Several levels of checkpoints at once, cheapest first: limits on all of them, whole iterations.

    w(T) = sum_i C_i / T_i + Lambda_i T_i / 2        T_1 <= T_2 <= ...

C_i is what a checkpoint of level i costs beyond that of the level below, Lambda_i the rate of the
failures whose cheapest surviving level is i.  `interval.ordered_periods_s` has the optimum without
limits; `nesting` is the case of memory and disk with every bound of a real job.
"""

import itertools
import math
from collections.abc import Sequence

from autockpt.policies.interval import best_period_s, first_order_period_s, ordered_periods_s
from autockpt.values.errors import ConfigError


def levels_waste(
    costs_s: Sequence[float], rates_per_s: Sequence[float], periods_s: Sequence[float]
) -> float:
    """The part of the waste rate that periods decide: sum C_i / T_i + Lambda_i T_i / 2."""
    levels = zip(costs_s, rates_per_s, periods_s, strict=True)
    return sum(cost / period + rate * period / 2.0 for cost, rate, period in levels)


def budget_periods_s(
    costs_s: Sequence[float], rates_per_s: Sequence[float], *, budget: float
) -> list[float]:
    """Best periods (s) where checkpoints may take at most `budget` of the time.

    All first-order optima sqrt(2 C_i / Lambda_i) stretched by one factor: with a multiplier u on
    sum C_i / T_i <= p the stationary points are sqrt(2 (1 + u) C_i / Lambda_i).  Levels that would
    stand in the wrong order share a period, as in `ordered_periods_s`.
    Source: Lagrange; p = budget.  Raises ConfigError unless 0 < budget and every rate is positive.
    """
    if not budget > 0 or min(rates_per_s) <= 0:
        raise ConfigError(f"budget {budget} and rates {list(rates_per_s)}: all must be positive")
    free = ordered_periods_s(costs_s, rates_per_s, form=first_order_period_s)
    spent = sum(cost / period for cost, period in zip(costs_s, free, strict=True))
    return [period * max(1.0, spent / budget) for period in free]


def longest_disk_period_s(lost_time_s: float, latency_s: float) -> float:
    """Longest period (s) at which a failure never loses more than `lost_time_s` (the RPO).

    The worst moment is just before a checkpoint becomes recoverable: T + P <= RPO, P = latency_s.
    Raises ConfigError where the latency alone is as long.
    """
    if latency_s >= lost_time_s:
        raise ConfigError(
            f"a checkpoint is recoverable after {latency_s} s, and at most {lost_time_s} s may be "
            f"lost; nearest: more than {latency_s} s"
        )
    return lost_time_s - latency_s


def nested_steps(
    costs_s: Sequence[float], rates_per_s: Sequence[float], *, iteration_s: float
) -> tuple[int, ...]:
    """Whole iterations between checkpoints of each level, each a multiple of the one below.

    The multiples are the floor or ceiling of T_{i+1} / T_i; for fixed multiples the levels are one
    level of cost sum C_i / n_i and rate sum n_i Lambda_i, whose period is closed form; floor or
    ceiling of that in iterations, and the waste decides among the 2^L combinations.
    Raises ConfigError without levels, for a level without failures, or without iterations.
    """
    if not costs_s or min(rates_per_s) <= 0 or iteration_s <= 0:
        raise ConfigError("nested intervals need levels with failures and an iteration time")
    free = [max(period, iteration_s) for period in ordered_periods_s(costs_s, rates_per_s)]
    ratios = [above / below for below, above in itertools.pairwise(free)]
    factors = itertools.product(*({math.floor(ratio), math.ceil(ratio)} for ratio in ratios))
    best: dict[tuple[int, ...], float] = {}
    for chosen in factors:
        multiples = list(itertools.accumulate((1, *chosen), int.__mul__))
        cost_s = sum(cost / n for cost, n in zip(costs_s, multiples, strict=True))
        rate = sum(rate * n for rate, n in zip(rates_per_s, multiples, strict=True))
        steps = (best_period_s(cost_s, rate) - cost_s) / iteration_s
        for k in (max(1, math.floor(steps)), max(1, math.ceil(steps))):
            period_s = k * iteration_s + cost_s
            best[tuple(k * n for n in multiples)] = cost_s / period_s + rate * period_s / 2.0
    return min(best, key=lambda steps: (best[steps], steps))
