"""How long an iteration takes: a histogram of the samples, or the quantiles when there are none."""

import math
from collections.abc import Sequence

from autockpt.reports.html.charts.svg import WIDTH, figure, line, rect, text
from autockpt.reports.html.escape import Html, join, tag
from autockpt.values.profile import Distribution
from autockpt.values.units import format_duration

HEIGHT, BASE, BINS = 150, 112, 48
FEW = 10
"""Fewer samples than this have no distribution: each is a dot."""


def draw(
    iteration_s: Distribution, samples: Sequence[float] = (), *, counted: str = "iterations"
) -> Html:
    """Bars of `samples` with p10, p50, p90 and p95 marked; `counted` names one sample."""
    quantiles = {"p10": iteration_s.p10, "p50": iteration_s.p50, "p95": iteration_s.p95}
    kept = sorted(s for s in samples if math.isfinite(s))
    low, high = _range(kept, iteration_s)
    title = "Iteration time: " + ", ".join(
        f"{name} {format_duration(value)}" for name, value in quantiles.items()
    )
    return figure(
        f"{title}, {iteration_s.n} {counted}",
        HEIGHT,
        *_shape(kept, iteration_s, low, high),
        line(0, BASE, WIDTH, BASE, "axis"),
        *[_quantile(name, value, low, high) for name, value in quantiles.items()],
        text(0, BASE + 32, format_duration(low)),
        text(WIDTH, BASE + 32, format_duration(high), anchor="end"),
        class_="iterations",
    )


def _range(samples: Sequence[float], iteration_s: Distribution) -> tuple[float, float]:
    low = min([*samples[:1], iteration_s.p10])
    high = max([*samples[-1:], iteration_s.p95])
    pad = 0.04 * (high - low) or 0.01 * abs(high) or 1e-3
    return max(0.0, low - pad), high + pad


def _shape(
    samples: Sequence[float], iteration_s: Distribution, low: float, high: float
) -> list[Html]:
    """Bars of many samples; the range of the quantiles where there are few or none."""
    if len(samples) >= FEW:
        return _bars(samples, low, high)
    dots = [
        tag("circle", tag("title", format_duration(sample)), cx=_x(sample, low, high),
            cy=BASE - 20, r=5, class_="here")
        for sample in samples
    ]  # fmt: skip
    return [_band(iteration_s, low, high), *dots]


def _bars(samples: Sequence[float], low: float, high: float) -> list[Html]:
    counts = [0] * BINS
    for sample in samples:
        counts[min(BINS - 1, int((sample - low) / (high - low) * BINS))] += 1
    width = WIDTH / BINS
    tallest = max(counts)
    return [
        rect(i * width, BASE - 84 * count / tallest, width - 1.5, 84 * count / tallest, "bin",
             f"{format_duration(low + (high - low) * i / BINS)}: {count} iterations")
        for i, count in enumerate(counts)
        if count
    ]  # fmt: skip


def _band(iteration_s: Distribution, low: float, high: float) -> Html:
    left, right = (_x(value, low, high) for value in (iteration_s.p10, iteration_s.p90))
    return rect(left, BASE - 40, right - left, 40, "bin", "p10 to p90")


def _quantile(name: str, value: float, low: float, high: float) -> Html:
    """The median below the axis, the others above, as they may lie close together."""
    x = _x(value, low, high)
    label = f"{name} {format_duration(value)}"
    if name == "p50":
        below = text(x, BASE + 22, label, anchor="middle")
        return join(line(x, 18, x, BASE + 6, "quantile"), below)
    anchor = "end" if name == "p10" and x > WIDTH / 8 else "start"
    return join(line(x, 18, x, BASE, "quantile"), text(x, 12, label, anchor=anchor))


def _x(value: float, low: float, high: float) -> float:
    return WIDTH * (value - low) / (high - low)
