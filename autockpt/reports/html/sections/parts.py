"""What the sections are made of: a titled block, a table, a definition list."""

from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.reports.html.escape import UNIT, Child, Html, join, tag
from autockpt.values.units import format_duration, format_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One block of the page with its place in the navigation."""

    id: str
    title: str
    body: Html

    def html(self) -> Html:
        """The block as a landmark with a heading."""
        heading = f"{self.id}-title"
        return tag("section", tag("h2", self.title, id=heading), self.body, id=self.id,
                   aria_labelledby=heading)  # fmt: skip


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Child]],
    *,
    caption: str,
    numbers: Sequence[int] = (),
) -> Html:
    """A table whose first column names the row; `numbers` are columns aligned right."""
    heads = [tag("th", name, scope="col", class_="n" if i in numbers else None)
             for i, name in enumerate(head)]  # fmt: skip
    body = [
        tag(
            "tr",
            *[
                tag("th", cell, scope="row")
                if i == 0
                else tag("td", cell, class_="n" if i in numbers else None)
                for i, cell in enumerate(row)
            ],
        )
        for row in rows
    ]
    return tag(
        "div",
        tag("table", tag("caption", caption), tag("thead", tag("tr", *heads)),
            tag("tbody", *body)),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption,
    )  # fmt: skip


def details(summary: str, *children: Child) -> Html:
    """Folded content."""
    return tag("details", tag("summary", summary), *children)


def copyable(content: Child, *, element_id: str, what: str, class_: str | None = None) -> Html:
    """Text with a button that copies it."""
    return tag(
        "div",
        tag("pre", tag("code", content, id=element_id), class_=class_),
        tag("button", "copy", type="button", class_="js-only", data_copy=element_id,
            aria_label=f"copy {what}"),
        class_="copyable",
    )  # fmt: skip


def duration(seconds: float | None) -> str:
    """Seconds for people; a dash for what is unknown."""
    return "\u2013" if seconds is None else format_duration(seconds)


def fraction(value: float | None) -> str:
    """A share for people; a dash for what is unknown."""
    return "\u2013" if value is None else format_fraction(value)


def prose(text: str) -> str:
    """Text in which a number and its unit stay on one line."""
    return UNIT.sub("\\1\u00a0\\2", text)


def chart(*children: Child) -> Html:
    """A chart with its legend."""
    return tag("div", join(*children), class_="chartbox")
