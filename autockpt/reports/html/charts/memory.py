"""Memory of a node: in use, added by checkpoints, and the limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.reports.html.charts.svg import WIDTH, figure, line, rect, text
from autockpt.reports.html.escape import Html, join
from autockpt.values.units import format_bytes

LABEL, RIGHT, ROW = 190, 10, 52


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One kind of memory."""

    label: str
    total_bytes: int
    used_bytes: int
    """Taken by others when the profile was made."""
    ours_bytes: int
    """Taken by checkpoints."""
    limit_bytes: int
    """Memory that may be used."""


def draw(bars: Sequence[Bar]) -> Html:
    """One bar each, on its own scale."""
    described = "; ".join(
        f"{bar.label}: {format_bytes(bar.ours_bytes)} for checkpoints, "
        f"{format_bytes(bar.used_bytes)} in use, limit {format_bytes(bar.limit_bytes)}"
        for bar in bars
    )
    rows = [_row(bar, ROW * i) for i, bar in enumerate(bars)]
    return figure(f"Memory. {described}", ROW * len(bars), *rows, class_="memory")


def _row(bar: Bar, y: float) -> Html:
    width = WIDTH - LABEL - RIGHT
    scale = width / max(bar.total_bytes, bar.used_bytes + bar.ours_bytes, bar.limit_bytes, 1)
    used, ours = bar.used_bytes * scale, bar.ours_bytes * scale
    limit = LABEL + bar.limit_bytes * scale
    over = bar.used_bytes + bar.ours_bytes > bar.limit_bytes
    caption = f"in use {format_bytes(bar.used_bytes)}" + (
        f", checkpoints {format_bytes(bar.ours_bytes)}" if bar.ours_bytes else ""
    )
    near_end = limit > WIDTH - 140
    limit_text = f"limit {format_bytes(bar.limit_bytes)}" + (" exceeded" if over else "")
    return join(
        text(0, y + 19, bar.label),
        rect(LABEL, y + 4, width, 20, "track"),
        rect(LABEL, y + 4, used, 20, "used", "in use"),
        rect(LABEL + used, y + 4, ours, 20, "ours over" if over else "ours", "checkpoints"),
        line(limit, y, limit, y + 28, "limit"),
        text(LABEL, y + 41, caption),
        text(limit, y + 41, limit_text, anchor="end" if near_end else "middle"),
    )
