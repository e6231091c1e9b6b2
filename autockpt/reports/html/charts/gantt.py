"""The run over time: one row per rank, copies and writes as they happened, failures as lines."""

from autockpt.reports.analysis.timeline import Mark, Row, Timeline
from autockpt.reports.html.charts.svg import WIDTH, boxes, figure, line, text, time_ticks
from autockpt.reports.html.escape import Html, join, tag
from autockpt.values.units import format_duration

LEFT, RIGHT, TOP, AXIS = 92, 12, 30, 26
KINDS = {
    "train": "training",
    "window": "idle window",
    "moved": "chunk moved inside",
    "beside": "chunk moved beside compute",
    "copy": "snapshot copied",
    "persist": "written to disk",
    "lost": "work lost",
    "down": "down",
}
"""Kinds of spans in the order they are drawn."""
INSET = ("copy", "moved", "beside")
"""Kinds that are drawn within another one."""
SHOWN_MARKS = {"failure": "failure", "plan": "plan changed", "degraded": "degraded"}
LINES = 60
"""More marks than this are not lines any more."""


def draw(timeline: Timeline) -> Html:
    """The chart of a run."""
    row = 22 if len(timeline.rows) <= 16 else 12
    height = TOP + row * len(timeline.rows) + AXIS
    scale = (WIDTH - LEFT - RIGHT) / (timeline.end_s or 1.0)
    step = 1 if row > 14 else 4
    last = len(timeline.rows) - 1
    rows = [
        _row(r, TOP + row * i, row, scale, named=i % step == 0 or i == last)
        for i, r in enumerate(timeline.rows)
    ]
    base = TOP + row * len(timeline.rows)
    within = (mark for mark in timeline.marks if mark.at_s <= timeline.end_s)
    marks = [mark for mark in within if mark.kind in SHOWN_MARKS][:LINES]
    ticks = [_tick(at_s, LEFT + at_s * scale, base) for at_s in time_ticks(timeline.end_s)]
    failures = sum(1 for mark in marks if mark.kind == "failure")
    return figure(
        f"Timeline of {timeline.ranks} ranks over {format_duration(timeline.end_s)}, "
        f"{failures} failures",
        height,
        *ticks,
        *rows,
        *[_mark(mark, LEFT + mark.at_s * scale, base) for mark in marks],
        class_="gantt",
    )


def legend(timeline: Timeline) -> Html:
    """The kinds that occur."""
    present = {kind for row in timeline.rows for kind in row.spans}
    marks = {mark.kind for mark in timeline.marks}
    return tag(
        "ul",
        *[tag("li", tag("i", class_=f"key g-{kind}"), label)
          for kind, label in KINDS.items() if kind in present],
        *[tag("li", tag("i", _symbol(kind), class_=f"sign {kind}", aria_hidden="true"), label)
          for kind, label in SHOWN_MARKS.items() if kind in marks],
        class_="legend",
    )  # fmt: skip


def _row(row: Row, y: float, height: float, scale: float, *, named: bool) -> Html:
    pad = 3 if height > 14 else 1.5
    label = text(LEFT - 10, y + height / 2 + 4, row.label, anchor="end")
    parts = [label] if named else []
    for kind, words in KINDS.items():
        spans = row.spans.get(kind, ())
        if spans:
            inset = pad * 2.2 if kind in INSET else pad
            d = boxes(spans, scale, LEFT, y + inset, height - 2 * inset)
            parts.append(tag("path", tag("title", f"{row.label}: {words}"), d=d,
                             class_=f"g-{kind}"))  # fmt: skip
    return join(*parts)


def _tick(at_s: float, x: float, base: float) -> Html:
    label = "0" if at_s == 0 else format_duration(at_s)
    return join(line(x, TOP, x, base + 4, "grid"), text(x, base + 20, label, anchor="middle"))


def _mark(mark: Mark, x: float, base: float) -> Html:
    title = f"{format_duration(mark.at_s)}: {mark.text}"
    return tag(
        "g",
        tag("title", title),
        line(x, TOP - 6, x, base, f"mark {mark.kind}"),
        text(x, TOP - 11, _symbol(mark.kind), anchor="middle", class_=f"sign {mark.kind}"),
    )


def _symbol(kind: str) -> str:
    return {"failure": "\u2715", "plan": "\u25b2", "degraded": "!"}[kind]
