"""Building blocks of the sections: a titled block, a table, a definition list."""

from dataclasses import dataclass

from autockpt.reports.html.escape import Child, Html, join, tag
from autockpt.reports.html.template import macro
from autockpt.values.units import format_duration, format_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One block of the page with its place in the navigation."""

    id: str
    title: str
    body: Html


table = macro("table")
"""head, rows, caption, numbers: the first column names the row, `numbers` are aligned right."""
copyable = macro("copyable")
"""content, element_id, what, class_: text with a button that copies it."""


def details(summary: str, *children: Child) -> Html:
    """Folded content."""
    return tag("details", tag("summary", summary), *children)


def duration(seconds: float | None) -> str:
    """Seconds for people; a dash for None."""
    return "\u2013" if seconds is None else format_duration(seconds)


def fraction(value: float | None) -> str:
    """A share for people; a dash for None."""
    return "\u2013" if value is None else format_fraction(value)


def chart(*children: Child) -> Html:
    """A chart with its legend."""
    return tag("div", join(*children), class_="chartbox")
