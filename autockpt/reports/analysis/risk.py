"""How a month may go, as values: goodputs over drawn failure rates and luck, and what to say of it.

The caller simulates; here stand quantiles and sentences.  `Luck.lost` is the fraction of wall time
that did not move the training on, one entry for each drawn world.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.reports.analysis.what_if import PARAMETERS, WhatIfCurve, optimum_s, waste
from autockpt.values.errors import ConfigError
from autockpt.values.units import format_duration, format_fraction

BAND = (0.05, 0.95)
TIMES = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
"""How many times as often failures may come, for the sensitivity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Luck:
    """One way to checkpoint in every drawn world."""

    name: str
    promised: float
    """The formula's lost time for the mean rate, 0..1 or more."""
    lost: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.lost or not all(map(math.isfinite, self.lost)):
            raise ConfigError(f"{self.name}: lost time must have finite samples")

    def quantile(self, q: float) -> float:
        """The smallest sample that a share `q` of all does not exceed."""
        ordered = sorted(self.lost)
        return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """Several ways in the same worlds."""

    length_s: float
    """Wall time of one world."""
    seed: int
    mtbf_s: tuple[float, float, float]
    """5 %, 50 % and 95 % quantiles of the drawn rates."""
    failures: tuple[int, int, int]
    """The same of the failures in a world."""
    ways: tuple[Luck, ...]
    """The plan first."""

    @property
    def worlds(self) -> int:
        """How many were drawn."""
        return len(self.ways[0].lost)

    def sentence(self) -> str:
        """The band of the plan, and how often it beats the next way."""
        plan = self.ways[0]
        low, high = (format_fraction(plan.quantile(q)) for q in BAND)
        said = (
            f"In 90 % of {self.worlds} simulated stretches of {format_duration(self.length_s)} "
            f"between {low} and {high} of the time are lost, {format_fraction(plan.quantile(0.5))} "
            "in the median"
        )
        if len(self.ways) > 1:
            other = self.ways[1]
            better = sum(a < b for a, b in zip(plan.lost, other.lost, strict=True)) / self.worlds
            said += f"; less than by {other.name} in {format_fraction(better)} of them"
        return said + "."


def sensitivity(curve: WhatIfCurve) -> list[tuple[float, float, float]]:
    """(times as many failures, lost time of the plan, of the best intervals then).

    The best intervals are the formula's, before limits and whole iterations, and ordered.
    """
    rows = []
    for times in TIMES:
        point = {**curve.point, "mtbf_s": curve.point["mtbf_s"] / times}
        rows.append((times, waste(point), waste(_best(point, curve.tiers))))
    return rows


def _best(point: dict[str, float], tiers: Sequence[str]) -> dict[str, float]:
    """With each tier at its own optimum, where that is an order; else as it stands, if better."""
    found = {f"{tier}_interval_s": max(1e-9, optimum_s(tier, point)) for tier in tiers}
    moved = {**point, **found}
    if "memory" in tiers and moved["memory_interval_s"] > moved["disk_interval_s"]:
        moved["memory_interval_s"] = moved["disk_interval_s"]
    assert set(moved) == set(PARAMETERS), "only known parameters move"
    return moved if waste(moved) < waste(point) else point
