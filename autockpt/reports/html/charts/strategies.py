"""Loss of each strategy, one bar under the other, on one scale."""

from collections.abc import Mapping, Sequence
from statistics import median

from autockpt.reports.html.charts.svg import WIDTH, figure, rect, text
from autockpt.reports.html.charts.where_time import LABELS
from autockpt.reports.html.escape import Html, join
from autockpt.values.units import format_fraction

NAME, ROW, BAR, NUMBER = 210, 26, 18, 90
CUT = 3.0
"""A bar longer than this many times the median is cut, so that the others stay readable."""


def draw(rows: Sequence[tuple[str, Mapping[str, float]]]) -> Html:
    """(name, shares of wall time by the names of `LABELS`), top to bottom."""
    lost = [sum(_lost(shares).values()) for _, shares in rows]
    full = min(max(lost), CUT * median(lost)) or 1.0
    scale = (WIDTH - NAME - NUMBER) / full
    bars = [
        _row(name, _lost(shares), i * ROW, scale, full) for i, (name, shares) in enumerate(rows)
    ]
    said = ", ".join(
        f"{name} {format_fraction(x)}" for (name, _), x in zip(rows, lost, strict=True)
    )
    return figure(f"Lost time by strategy: {said}", ROW * len(rows), *bars, class_="strategies")


def _lost(shares: Mapping[str, float]) -> dict[str, float]:
    return {part: max(0.0, shares.get(part, 0.0)) for part in LABELS if part != "productive"}


def _row(name: str, lost: Mapping[str, float], y: float, scale: float, full: float) -> Html:
    x, left, total = float(NAME), full, sum(lost.values())
    pieces = [text(NAME - 10, y + 14, name, anchor="end")]
    for part, share in lost.items():
        width = min(share, left) * scale
        left -= min(share, left)
        if width > 0:
            said = f"{name}: {LABELS[part]} {format_fraction(share)}"
            pieces.append(rect(x, y, width, BAR, f"part {part}", said))
            x += width
    cut = " (cut)" if total > full * (1 + 1e-9) else ""
    return join(*pieces, text(x + 8, y + 14, f"{format_fraction(total)}{cut}"))
