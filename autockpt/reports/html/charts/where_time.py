"""Where time goes: a bar of all of it, and beneath it the lost part under a magnifying glass."""

from collections.abc import Mapping

from autockpt.reports.html.charts.svg import WIDTH, figure, rect, text
from autockpt.reports.html.escape import Html, join, tag
from autockpt.values.units import format_fraction

LABELS = {
    "productive": "training that counts",
    "stall": "checkpoint stall",
    "slowdown": "slow-down while writing",
    "lost": "lost work",
    "down": "down: detect, restart, restore",
    "other": "other: start-up, unexplained",
}
"""Parts in the order they are drawn; also the CSS classes."""

BAR, GAP = 34, 36


def draw(parts: Mapping[str, float], *, whole: str = "wall time") -> Html:
    """`parts` in any unit; shares of their sum are drawn.  Negative parts are not drawn."""
    shown = {name: max(0.0, parts.get(name, 0.0)) for name in LABELS}
    total = sum(shown.values()) or 1.0
    lost = {name: value for name, value in shown.items() if name != "productive"}
    lost_total = sum(lost.values())
    good = shown["productive"] / total
    described = ", ".join(
        f"{LABELS[name]} {format_fraction(value / total)}"
        for name, value in shown.items()
        if value > 0
    )
    top = [_bar(shown, total, 0, 0.0, WIDTH)]
    if good > 0.3:
        top.append(text(12, 22, f"{LABELS['productive']} {format_fraction(good)}", class_="on"))
    if lost_total <= 0 or not good:
        return figure(f"Share of {whole}: {described}", BAR, *top, class_="bars")
    y = BAR + GAP
    left = WIDTH * good
    glass = tag("path", d=f"M{left:.1f} {BAR + 2}L{WIDTH} {BAR + 2}L{WIDTH} {y - 2}L0 {y - 2}Z",
                class_="glass")  # fmt: skip
    caption = text(WIDTH / 2, BAR + 22, f"the other {format_fraction(1 - good)}, enlarged",
                   anchor="middle")  # fmt: skip
    return figure(
        f"Share of {whole}: {described}",
        y + BAR,
        *top,
        glass,
        caption,
        _bar(lost, lost_total, y, 0.0, WIDTH, labels=True, share_of=total),
        class_="bars",
    )


def legend(parts: Mapping[str, float]) -> Html:
    """Colour, name and share of each part."""
    total = sum(max(0.0, value) for value in parts.values()) or 1.0
    return tag(
        "ul",
        *[
            tag("li", tag("i", class_=f"key {name}"), f"{label} ",
                tag("b", format_fraction(max(0.0, parts[name]) / total)))
            for name, label in LABELS.items()
            if parts.get(name, 0.0) > 0
        ],
        class_="legend",
    )  # fmt: skip


def _bar(
    parts: Mapping[str, float],
    total: float,
    y: float,
    x: float,
    width: float,
    *,
    labels: bool = False,
    share_of: float | None = None,
) -> Html:
    pieces: list[Html] = []
    for name, value in parts.items():
        if value <= 0:
            continue
        part = width * value / total
        share = format_fraction(value / (share_of or total))
        pieces.append(rect(x, y, max(part - 1.0, 0.6), BAR, f"part {name}",
                           f"{LABELS[name]}: {share}"))  # fmt: skip
        if labels and part > 64:
            pieces.append(text(x + 10, y + 22, share, class_=f"on {name}"))
        x += part
    return join(*pieces)
