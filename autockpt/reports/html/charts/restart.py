"""Where a restart's time went: one bar for each, all on the same scale."""

from collections.abc import Sequence

from autockpt.reports.analysis.restarts import Restart
from autockpt.reports.html.charts.svg import WIDTH, figure, rect, text
from autockpt.reports.html.escape import Html, tag
from autockpt.values.units import format_duration

GROUPS = {
    "lost": ("noticed and launched", ("detect", "not started", "launch")),
    "down": ("interpreter, imports, script", ("interpreter", "torch", "script")),
    "stall": ("process group, other ranks", ("group", "wait")),
    "productive": ("restore", ("fetch", "read", "apply")),
    "slowdown": ("first iteration", ("first",)),
}
"""CSS class -> its meaning: all parts could not be distinguished by colour."""

BAR, GAP = 26, 10


def draw(shown: Sequence[Restart]) -> Html:
    """One bar a restart, as long as it took."""
    longest = max((restart.total_s for restart in shown), default=0.0) or 1.0
    pieces: list[Html] = []
    for row, restart in enumerate(shown):
        x, y = 0.0, row * (BAR + GAP)
        for class_, (label, _) in GROUPS.items():
            seconds = _seconds(restart, class_)
            width = WIDTH * seconds / longest
            if seconds <= 0:
                continue
            shown_s = format_duration(seconds)
            pieces.append(rect(x, y, max(width - 1.0, 0.6), BAR, f"part {class_}",
                               f"{label}: {shown_s}"))  # fmt: skip
            if width > 80:
                pieces.append(text(x + 10, y + 18, shown_s, class_=f"on {class_}"))
            x += width
    described = ", ".join(f"{format_duration(restart.total_s)}" for restart in shown)
    return figure(
        f"Restarts by what they spent their time on: {described}",
        len(shown) * (BAR + GAP) - GAP,
        *pieces,
        class_="bars",
    )


def legend() -> Html:
    """Colour and name of each group."""
    return tag(
        "ul",
        *[
            tag("li", tag("i", class_=f"key {class_}"), label)
            for class_, (label, _) in GROUPS.items()
        ],
        class_="legend",
    )


def _seconds(restart: Restart, class_: str) -> float:
    return sum(restart.parts.get(name) or 0.0 for name in GROUPS[class_][1])
