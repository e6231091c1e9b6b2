"""Throughput of the storage by writers and chunk size: a table first, a heat map second."""

from collections.abc import Sequence

from autockpt.reports.html.escape import Html, join, tag
from autockpt.values.profile import StorageMeasure
from autockpt.values.units import format_rate

DARKEST = 40
"""Per cent of the accent mixed in at most: text stays readable above it."""


def draw(measures: Sequence[StorageMeasure], *, caption: str, chosen: tuple[int, int]) -> Html:
    """Median rates in GB/s; `chosen` is (writers, chunk bytes) of the plan."""
    chunks = sorted({m.chunk_bytes for m in measures})
    writers = sorted({m.writers for m in measures})
    found = {(m.writers, m.chunk_bytes): m for m in measures}
    best = max((m.bytes_per_s.p50 for m in measures), default=0.0)
    head = tag("tr", tag("th", "writers", scope="col"),
               *[tag("th", _size(chunk), scope="col") for chunk in chunks])  # fmt: skip
    rows = [
        tag("tr", tag("th", str(count), scope="row"),
            *[_cell(found.get((count, chunk)), best, (count, chunk) == chosen)
              for chunk in chunks])
        for count in writers
    ]  # fmt: skip
    return tag(
        "div",
        tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *rows),
            class_="heat"),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption,
    )  # fmt: skip


def _cell(measure: StorageMeasure | None, best: float, chosen: bool) -> Html:
    if measure is None:
        return tag("td", "\u2013", title="not measured")
    rate = measure.bytes_per_s
    mix = round(DARKEST * rate.p50 / best) if best > 0 else 0
    shown = f"{rate.p50 / 1e9:.2f}"
    top = rate.p50 >= best
    note = " best" if top else ""
    return tag(
        "td",
        join(tag("b", shown) if top else shown, tag("small", note) if top else None,
             tag("small", " plan") if chosen else None),
        style=f"--mix:{mix}%",
        class_="chosen" if chosen else None,
        title=f"p10 {format_rate(rate.p10)}, p90 {format_rate(rate.p90)}, n {rate.n}",
    )  # fmt: skip


def _size(count: int) -> str:
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"
