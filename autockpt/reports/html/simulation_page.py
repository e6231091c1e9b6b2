"""The page of `autockpt simulate --html`: what each strategy loses, as a chart and as tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.reports.html.charts import strategies
from autockpt.reports.html.charts.where_time import LABELS
from autockpt.reports.html.escape import Html, tag
from autockpt.reports.html.page import page
from autockpt.reports.html.sections.parts import Section, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy."""

    name: str
    cells: tuple[str, ...]
    """Of the table of results, the name first."""
    shares: dict[str, float]
    """Of wall time: productive, stall, slowdown, lost, down, other."""
    says: str
    """Its rule in a sentence."""


def render(*, cluster: str, command: str, head: Sequence[str], rows: Sequence[Row]) -> str:
    """One offline page; `rows` best first, `head` names their cells."""
    chart = Section(
        id="lost",
        title="Where time is lost",
        body=tag(
            "div",
            tag("p", "Shares of wall time that did not move the training on.", class_="lead"),
            strategies.draw([(row.name, row.shares) for row in rows]),
            _legend(rows),
        ),
    )
    results = Section(
        id="results",
        title="Results",
        body=table(
            head,
            [row.cells for row in rows],
            caption="Percent of wall time; best first",
            numbers=range(2, len(head) - 1),
        ),
    )
    rules = Section(
        id="rules",
        title="Rules",
        body=table(
            ("strategy", "rule"), [(row.name, row.says) for row in rows], caption="What each does"
        ),
    )
    return page(
        "simulation.html",
        cluster=cluster,
        command=command,
        sections=(chart, results, rules),
        data=Html(""),
    )


def _legend(rows: Sequence[Row]) -> Html:
    """The parts that occur."""
    return tag(
        "ul",
        *[
            tag("li", tag("i", class_=f"key {part}"), label)
            for part, label in LABELS.items()
            if part != "productive" and any(row.shares.get(part, 0.0) > 0 for row in rows)
        ],
        class_="legend",
    )
