"""How lost time spreads over simulated runs: one violin for each way to checkpoint."""

import math
from collections.abc import Sequence

from autockpt.reports.analysis.risk import BAND, Luck, Risk
from autockpt.reports.html.charts.svg import WIDTH, figure, line, polyline, rect, text
from autockpt.reports.html.escape import Html, join, tag
from autockpt.values.units import format_fraction

LEFT, RIGHT, TOP, ROW, HALF, BOTTOM = 190, 24, 8, 74, 27, 44
LEAST = 1e-7
"""Lost time below this is drawn there: a logarithm has no 0."""
SAMPLES = 120
WIDTH_OF_KERNEL = 0.9
"""Silverman's factor for the smoothing of the violins."""


def draw(risk: Risk) -> Html:
    """Violins on a logarithmic axis of lost time, with median, 90 % band and promise."""
    every = [max(LEAST, x) for way in risk.ways for x in way.lost]
    low, high = min(every) / 1.3, max(every) * 1.3
    rows = [_row(way, i, low, high) for i, way in enumerate(risk.ways)]
    base = TOP + ROW * len(risk.ways)
    said = "; ".join(f"{way.name} {_band(way)}" for way in risk.ways)
    return figure(
        f"Lost time, 90 % band: {said}",
        base + BOTTOM,
        *[_tick(x, low, high, base) for x in _ticks(low, high)],
        *rows,
        text(LEFT + (WIDTH - LEFT - RIGHT) / 2, base + BOTTOM - 6, "lost time (log scale)",
             anchor="middle"),
        class_="luck",
    )  # fmt: skip


def legend() -> Html:
    """Meaning of the marks."""
    items = (
        (tag("path", d="M1 6Q14 -4 27 6Q14 16 1 6Z", class_="violin"), "simulated runs, by number"),
        (tag("path", d="M1 6H27", class_="whisker"), "90 % of them"),
        (tag("circle", cx=14, cy=6, r=4.5, class_="here"), "median"),
        (tag("path", d="M14 1V11", class_="best"), "promised: the mean"),
    )
    swatches = [
        tag("svg", mark, viewBox="0 0 28 12", width=28, height=12, aria_hidden="true")
        for mark, _ in items
    ]
    lines = [tag("li", swatch, said) for swatch, (_, said) in zip(swatches, items, strict=True)]
    return tag("ul", *lines, class_="legend")


def _row(way: Luck, index: int, low: float, high: float) -> Html:
    middle = TOP + ROW * index + ROW / 2
    left, right = (_x(way.quantile(q), low, high) for q in BAND)
    promised = max(LEAST, way.promised)
    inside = low <= promised <= high
    x = _x(promised, low, high)
    return join(
        text(LEFT - 14, middle - 2, way.name, anchor="end"),
        text(LEFT - 14, middle + 15, _band(way), anchor="end", class_="dim"),
        tag("path", tag("title", f"{way.name}: {_band(way)}"), d=_violin(way, middle, low, high),
            class_="violin"),
        rect(left, middle - 1.25, right - left, 2.5, "whisker", f"90 % band {_band(way)}"),
        tag("path", tag("title", f"promised {format_fraction(way.promised)}"),
            d=f"M{x:.1f} {middle - 15:g}V{middle + 15:g}", class_="best") if inside else None,
        tag("circle", tag("title", f"median {format_fraction(way.quantile(0.5))}"),
            cx=_x(way.quantile(0.5), low, high), cy=middle, r=5, class_="here"),
    )  # fmt: skip


def _violin(way: Luck, middle: float, low: float, high: float) -> str:
    """The density of the logarithms, mirrored; as tall as the row where it is densest."""
    logs = [math.log(max(LEAST, x)) for x in way.lost]
    places = [
        math.log(low) + (math.log(high) - math.log(low)) * i / SAMPLES for i in range(SAMPLES + 1)
    ]
    heights = _density(logs, places)
    top = max(heights) or 1.0
    shape = [
        (_x(math.exp(p), low, high), HALF * h / top) for p, h in zip(places, heights, strict=True)
    ]
    shape = [(x, h) for x, h in shape if h > 0.15]
    upper = [(x, middle - h) for x, h in shape]
    lower = [(x, middle + h) for x, h in reversed(shape)]
    return polyline([*upper, *lower]) + "Z"


def _density(values: Sequence[float], places: Sequence[float]) -> list[float]:
    """Gaussian kernels of Silverman's width (1986)."""
    n, mean = len(values), sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / n)
    kernel = max(0.02, WIDTH_OF_KERNEL * spread * n**-0.2)
    return [sum(math.exp(-(((p - v) / kernel) ** 2) / 2) for v in values) / n for p in places]


def _band(way: Luck) -> str:
    low, high = (format_fraction(way.quantile(q)) for q in BAND)
    return f"{low} to {high}"


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 times them where there is room."""
    several = (1.0,) if math.log10(high / low) > 3 else (1.0, 2.0, 5.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**k for k in powers for m in several if low <= m * 10.0**k <= high]


def _tick(share: float, low: float, high: float, base: float) -> Html:
    x = _x(share, low, high)
    label = text(x, base + 16, format_fraction(share), anchor="middle")
    return join(line(x, TOP, x, base + 4, "grid"), label)


def _x(share: float, low: float, high: float) -> float:
    part = math.log(max(LEAST, share) / low) / math.log(high / low)
    return LEFT + (WIDTH - LEFT - RIGHT) * part
