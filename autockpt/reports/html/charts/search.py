"""A search, write by write: time over its order, the best so far, and the default's level."""

import math
from collections.abc import Sequence
from itertools import accumulate

from autockpt.reports.analysis.search import SearchedWrite, SearchHistory
from autockpt.reports.html.charts.svg import WIDTH, figure, line, polyline, rect, text
from autockpt.reports.html.escape import Html, join, tag
from autockpt.values.units import format_duration, format_fraction

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 250, 84, 12, 24, 42
NAME, ROW, BAR = 110, 26, 16
SHAPES = {
    "seed": "M-5 -5H5V5H-5Z",
    "search": "M0 -5A5 5 0 1 0 0.01 -5Z",
    "final": "M0 -6.5L6.5 0L0 6.5L-6.5 0Z",
}
"""Square, circle, diamond: the shape shows the stage besides the colour."""
WORDS = {"seed": "seed", "search": "search", "final": "final, in turn with the default"}


def draw(history: SearchHistory) -> Html:
    """Dots by stage on a logarithmic axis; failed writes are crosses at the top."""
    done = [w.seconds for w in history.writes if w.seconds is not None]
    if not done:
        return figure("No write succeeded", 24, text(0, 16, "No write succeeded."))
    low, high = min(done) / 1.15, max(done) * 1.15
    step = (WIDTH - LEFT - RIGHT) / max(1, len(history.writes))
    marks = [_mark(w, LEFT + (i + 0.5) * step, low, high) for i, w in enumerate(history.writes)]
    said = f"{len(history.writes)} writes, from {format_duration(min(done))}"
    return figure(
        f"Measured writes in their order: {said} to {format_duration(max(done))}",
        HEIGHT,
        *[_grid(tick, low, high) for tick in _ticks(low, high)],
        *_best(history.writes, step, low, high),
        *marks,
        text(0, 12, "time until durable (log scale)"),
        text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 6, "write", anchor="middle"),
        class_="search",
    )


def legend() -> Html:
    """Meaning of the marks."""
    items = [
        tag("li", tag("svg", tag("path", d=shape, class_=f"write {stage}"), viewBox="-8 -8 16 16",
                      width=16, height=16, aria_hidden="true"), WORDS[stage])
        for stage, shape in SHAPES.items()
    ]  # fmt: skip
    best = tag("svg", tag("path", d="M1 6H27", class_="best-so-far"), viewBox="0 0 28 12",
               width=28, height=12, aria_hidden="true")  # fmt: skip
    return tag("ul", *items, tag("li", best, "best so far"), class_="legend")


def importances(history: SearchHistory) -> Html:
    """One bar for each knob."""
    scale = WIDTH - NAME - 90
    rows = [
        join(
            text(NAME - 10, i * ROW + 13, name, anchor="end"),
            rect(NAME, i * ROW, max(1.0, share * scale), BAR, "bin", f"{name}: {share:.0%}"),
            text(NAME + max(1.0, share * scale) + 8, i * ROW + 13, format_fraction(share)),
        )
        for i, (name, share) in enumerate(history.importances.items())
    ]
    said = ", ".join(f"{name} {share:.0%}" for name, share in history.importances.items())
    return figure(f"Share of the spread by knob: {said}", ROW * len(rows), *rows, class_="bars")


def _mark(write: SearchedWrite, x: float, low: float, high: float) -> Html:
    name = f"{write.number + 1}, {write.stage}: {write.way}"
    if write.seconds is None:
        said = tag("title", f"{name}: failed, {write.failure}")
        return tag("path", said, d=f"M{x - 4:.1f} {TOP - 4}l8 8m0 -8l-8 8", class_="write failed")
    at = f"translate({x:.1f} {_y(write.seconds, low, high):.1f})"
    said = tag("title", f"{name}: {format_duration(write.seconds)}")
    return tag("path", said, d=SHAPES[write.stage], transform=at, class_=f"write {write.stage}")


def _best(writes: Sequence[SearchedWrite], step: float, low: float, high: float) -> list[Html]:
    """A staircase of the fastest write so far."""
    times = [math.inf if w.seconds is None else w.seconds for w in writes]
    points: list[tuple[float, float]] = []
    for i, seconds in enumerate(accumulate(times, min)):
        if math.isfinite(seconds):
            y = _y(seconds, low, high)
            points += [(LEFT + i * step, y), (LEFT + (i + 1) * step, y)]
    return [tag("path", d=polyline(points), class_="best-so-far")]


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten inside the range."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [m * 10.0**k for k in range(first, last + 1) for m in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def _grid(tick: float, low: float, high: float) -> Html:
    y = _y(tick, low, high)
    label = text(LEFT - 10, y + 4, format_duration(tick), anchor="end")
    return join(line(LEFT, y, WIDTH - RIGHT, y, "grid"), label)


def _y(seconds: float, low: float, high: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - math.log(seconds / low) / math.log(high / low))
