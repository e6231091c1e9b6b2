"""How a month may go: goodput over what is not known (the failure rate) and over luck.

Each draw takes a rate from its posterior and a history from that rate; all strategies meet the same
histories.  A promise is the mean of this; the spread says how little a mean may say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from autockpt.tuner.simulation.engine import replay
from autockpt.tuner.simulation.history import World, draw
from autockpt.tuner.simulation.strategy import Strategy
from autockpt.values.errors import ConfigError

N = TypeVar("N", int, float)

DRAWS = 200
"""Worlds: the 5 % quantile is the tenth of them."""
LENGTH_S = 30 * 86400.0
MOST_FAILURES = 100.0
"""In the mean of a draw: where more would come in a month, a shorter time is drawn.  More change
the spread little, and all of them together take a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """Goodputs of strategies over the same draws."""

    length_s: float
    """Of wall time in each draw."""
    mtbf_s: tuple[float, ...]
    """Drawn, one for each world."""
    failures: tuple[int, ...]
    """That came in it."""
    goodputs: dict[str, tuple[float, ...]]
    """By strategy, in the order of the draws."""


def risk(
    strategies: Sequence[Strategy],
    *,
    memory_per_s: float,
    disk_per_s: float,
    shape: float,
    nodes: int,
    draws: int = DRAWS,
    seed: int = 0,
) -> Risk:
    """Goodput of each strategy over `draws` worlds; the same arguments give the same result.

    `memory_per_s`, `disk_per_s`: mean rates of the failures that memory survives and does not
    survive.  `shape`: of the Gamma of their sum; the mix is known.
    Raises ConfigError where nothing ever fails.
    """
    total = memory_per_s + disk_per_s
    if not total > 0 or not shape > 0:
        raise ConfigError(f"{total} interruptions/s of shape {shape}: must be more than 0")
    length_s = min(LENGTH_S, MOST_FAILURES / total)
    factors = np.random.default_rng(seed).gamma(shape, 1.0 / shape, size=draws)
    # A rate of nothing is drawn for small shapes: once in a thousand draws' time is as good.
    rates = np.maximum(factors * total, 1e-3 / length_s / draws)
    share = min(1.0, memory_per_s / total)
    histories = [
        draw(
            World(nodes=nodes, mtbf_s=float(1.0 / rate), process_share=share),
            length_s=length_s,
            seed=seed,
            run=run,
        )
        for run, rate in enumerate(rates)
    ]
    return Risk(
        length_s=length_s,
        mtbf_s=tuple(float(1.0 / rate) for rate in rates),
        failures=tuple(len(history.failures) for history in histories),
        goodputs={
            strategy.name: tuple(replay(strategy, history).goodput for history in histories)
            for strategy in strategies
        },
    )


def quantiles(samples: Sequence[N]) -> tuple[N, N, N]:
    """5 %, 50 % and 95 %: each the smallest sample that so many do not exceed."""
    ordered, n = sorted(samples), len(samples)
    low, middle, high = (ordered[max(0, math.ceil(q * n) - 1)] for q in (0.05, 0.5, 0.95))
    return low, middle, high
