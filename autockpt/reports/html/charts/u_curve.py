"""Lost time against the interval: one U per tier, where the plan stands, where the best would be.

The browser redraws the same chart with the same numbers when a slider moves.  `geometry` hands
geometry and sampling to it, so that there is one of each.
"""

import math
from collections.abc import Mapping, Sequence

from autockpt.reports.analysis.what_if import WhatIfCurve, optimum_s, waste
from autockpt.reports.html.charts.svg import WIDTH, figure, line, nice_ticks, polyline, text
from autockpt.reports.html.escape import Html, join, short, tag
from autockpt.values.units import format_duration, format_fraction

LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 64, 20, 30, 46, 310
SAMPLES = 96
TICKS_S = (0.1, 1, 10, 60, 600, 3600, 21600, 86400, 604800)
"""Where the time axis may have labels."""


def geometry(curve: WhatIfCurve) -> dict[str, float | list[float]]:
    """The box, the range of intervals and the sampling: for this chart and for the browser."""
    intervals = [curve.point[f"{tier}_interval_s"] for tier in curve.tiers]
    best = [optimum_s(tier, curve.point) for tier in curve.tiers]
    finite = [s for s in (*intervals, *best) if 0 < s < 1e8]
    low = 10.0 ** math.floor(math.log10(min(finite) / 3))
    high = 10.0 ** math.ceil(math.log10(max(finite) * 5))
    return {
        "left": LEFT,
        "top": TOP,
        "width": WIDTH - LEFT - RIGHT,
        "height": HEIGHT - TOP - BOTTOM,
        "low": low,
        "high": high,
        "samples": SAMPLES,
    }


def draw(curve: WhatIfCurve) -> Html:
    """The chart at the plan's point."""
    box = geometry(curve)
    low, high = _number(box, "low"), _number(box, "high")
    here = waste(curve.point)
    sampled = {tier: sample(curve.point, tier, low, high) for tier in curve.tiers}
    ticks = nice_ticks(ceiling(here, [w for points in sampled.values() for _, w in points]))
    top = ticks[-1] or 1.0
    paths, marks = [], []
    for tier in curve.tiers:
        points = [(_x(s, low, high), _y(w, top)) for s, w in sampled[tier]]
        paths.append(tag("path", d=polyline(points), class_=f"curve {tier}", id=f"curve-{tier}"))
        x = _x(curve.point[f"{tier}_interval_s"], low, high)
        marks.append(_marker(tier, x, _y(here, top)))
        marks.append(_optimum(tier, _x(optimum_s(tier, curve.point), low, high)))
    clip = tag("clipPath", tag("rect", x=LEFT, y=TOP, width=_number(box, "width"),
                               height=_number(box, "height")), id="u-clip")  # fmt: skip
    return figure(
        f"Lost time against the checkpoint interval; the plan loses {format_fraction(here)}",
        HEIGHT,
        tag("defs", clip),
        tag("g", *[_grid(tick, top) for tick in ticks], id="u-grid"),
        *[_time_label(s, low, high) for s in TICKS_S if low <= s <= high],
        text(LEFT + _number(box, "width") / 2, HEIGHT - 6, "checkpoint interval (log scale)",
             anchor="middle"),
        text(0, 12, "time lost"),
        tag("g", *paths, *marks, clip_path="url(#u-clip)"),
        class_="u-curve",
    )  # fmt: skip


def legend(tiers: Sequence[str]) -> Html:
    """Meaning of the lines and marks, with the line style as well as the colour."""
    names = {"memory": "interval to memory", "disk": "interval to disk"}
    items = [
        tag(
            "li",
            tag("svg", tag("path", d="M1 6H27", class_=f"curve {tier}"), viewBox="0 0 28 12",
                width=28, height=12, aria_hidden="true"),
            names.get(tier, tier),
        )
        for tier in tiers
    ]  # fmt: skip
    dot = tag("svg", tag("circle", cx=6, cy=6, r=4.5, class_="here"), viewBox="0 0 12 12", width=12,
              height=12, aria_hidden="true")  # fmt: skip
    tick = tag("svg", tag("path", d="M6 1V11", class_="best"), viewBox="0 0 12 12", width=12,
               height=12, aria_hidden="true")  # fmt: skip
    return tag("ul", *items, tag("li", dot, "the plan"), tag("li", tick, "least loss"),
               class_="legend")  # fmt: skip


def sample(
    point: Mapping[str, float], tier: str, low: float, high: float
) -> list[tuple[float, float]]:
    """(interval, waste) along the axis when only this tier's interval moves."""
    found = []
    for i in range(SAMPLES + 1):
        interval_s = low * (high / low) ** (i / SAMPLES)
        found.append((interval_s, waste({**point, f"{tier}_interval_s": interval_s})))
    return found


def ceiling(here: float, wastes: Sequence[float]) -> float:
    """Top of the axis: a few times the best, so that the bottom of the U is visible."""
    return max(4.0 * min(wastes), 1.4 * here)


def _number(box: Mapping[str, float | list[float]], name: str) -> float:
    value = box[name]
    return value if not isinstance(value, list) else value[0]


def _x(interval_s: float, low: float, high: float) -> float:
    share = math.log(max(interval_s, low / 10) / low) / math.log(high / low)
    return LEFT + (WIDTH - LEFT - RIGHT) * share


def _y(fraction: float, top: float) -> float:
    """Far above the axis is enough: a clipped point needs no exact place."""
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(fraction / top, 3.0))


def _grid(tick: float, top: float) -> Html:
    y = _y(tick, top)
    label = text(LEFT - 10, y + 4, format_fraction(tick), anchor="end")
    return join(line(LEFT, y, WIDTH - RIGHT, y, "grid"), label)


def _time_label(interval_s: float, low: float, high: float) -> Html:
    x = _x(interval_s, low, high)
    base = HEIGHT - BOTTOM
    label = format_duration(interval_s)
    return join(line(x, base, x, base + 4, "grid"), text(x, base + 18, label, anchor="middle"))


def _marker(tier: str, x: float, y: float) -> Html:
    return tag("circle", cx=x, cy=y, r=6, class_=f"here {tier}", id=f"here-{tier}")


def _optimum(tier: str, x: float) -> Html:
    base = HEIGHT - BOTTOM
    return tag("path", d=f"M{short(x)} {base}V{base - 14}", class_=f"best {tier}",
               id=f"best-{tier}")  # fmt: skip
