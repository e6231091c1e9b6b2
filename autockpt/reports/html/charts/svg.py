"""Axes, scales and frames that the charts share."""

import math
from collections.abc import Sequence

from autockpt.reports.html.escape import Child, Html, short, tag

WIDTH = 960
"""Width of a chart in its own units; the page scales it."""


def figure(title: str, height: float, *children: Child, class_: str = "") -> Html:
    """An SVG as wide as the page, with a name for screen readers."""
    return tag(
        "svg",
        tag("title", title),
        *children,
        class_=f"chart {class_}".strip(),
        viewBox=f"0 0 {WIDTH} {short(height)}",
        role="img",
        focusable="false",
    )


def text(
    x: float, y: float, content: str, *, anchor: str | None = None, class_: str | None = None
) -> Html:
    """One line of text with its baseline at y."""
    return tag("text", content, x=x, y=y, text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, title: str = "") -> Html:
    """A box; `title` shows on hover."""
    return tag(
        "rect",
        tag("title", title) if title else None,
        x=x,
        y=y,
        width=max(width, 0.0),
        height=height,
        class_=class_,
    )


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """The `d` of a path through `points`."""
    return "M" + "L".join(f"{short(x)} {short(y)}" for x, y in points)


def boxes(spans: Sequence[float], scale: float, x: float, y: float, height: float) -> str:
    """The `d` of many boxes: start, end, start, end, ...; none thinner than a hair."""
    parts = []
    for start, end in zip(spans[::2], spans[1::2], strict=True):
        left, width = x + start * scale, max(1.2, (end - start) * scale)
        parts.append(f"M{left:.1f} {short(y)}h{width:.1f}v{short(height)}h-{width:.1f}z")
    return "".join(parts)


def nice_ticks(maximum: float, count: int = 4) -> list[float]:
    """Round numbers from 0 to about `maximum`, e.g. [0, 0.5, 1, 1.5]."""
    if maximum <= 0 or not math.isfinite(maximum):
        return [0.0]
    raw = maximum / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * magnitude >= raw * 0.999)
    return [i * step for i in range(int(maximum / step * 1.0001) + 1)]


def time_ticks(end_s: float, count: int = 8) -> list[float]:
    """Round moments from 0 to `end_s` in steps people count in."""
    steps = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400,
             21600, 43200, 86400)  # fmt: skip
    days = math.ceil(end_s / count / 86400) * 86400
    step = next((float(s) for s in steps if s * count >= end_s), float(max(days, 86400)))
    return [i * step for i in range(int(end_s / step) + 1)]
