"""Rows of ablations: a gain with its target, and by how much a target was missed."""

import statistics
from collections.abc import Sequence

from benchmarks.harness import Row


def gain(
    contestant: str,
    samples: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    figure: str = "gain",
    value: float | None = None,
    note: str = "",
) -> Row:
    """The median of ratios (or `value`, with `samples` as its spread), judged against a target."""
    if not samples:
        return Row(contestant=contestant, figure=figure, value=None, unit="x", n=0)
    value = statistics.median(samples) if value is None else value
    target, met = "", None
    if at_least is not None:
        target, met = f">= {at_least:.3g}", value >= at_least
        target += "" if met else f", missed by {1 - value / at_least:.0%}"
    elif at_most is not None:
        target, met = f"<= {at_most:.3g}", value <= at_most
        target += "" if met else f", missed by {value / at_most - 1:.0%}"
    return Row(
        contestant=contestant,
        figure=figure,
        value=value,
        unit="x",
        spread=(min(samples), max(samples)),
        n=len(samples),
        target=target,
        met=met,
        note=note,
    )


def without_one(above: Sequence[float], below: Sequence[float]) -> tuple[float, list[float]]:
    """A ratio of medians, and what it is with each round left out: its spread.

    For differences near zero, whose ratio of one round says nothing.
    """

    def ratio(skip: int) -> float:
        return statistics.median(x for i, x in enumerate(above) if i != skip) / statistics.median(
            x for i, x in enumerate(below) if i != skip
        )

    rounds = range(min(len(above), len(below)))
    return ratio(-1), [ratio(i) for i in rounds] if len(rounds) > 1 else [ratio(-1)]
