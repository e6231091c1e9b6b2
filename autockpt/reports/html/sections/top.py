"""Header, banner, verdict and key figures: what is read when nothing else is."""

from collections.abc import Sequence

from autockpt.reports.html.escape import Html, join, tag
from autockpt.reports.html.sections.parts import Section, copyable, prose
from autockpt.reports.model import ATTACH_LINES, ReportModel

LONG_VALUE = 8
"""Tiles with more characters are set smaller."""
KINDS = {"profile": "autockpt profile", "run": "autockpt run report"}


def header(model: ReportModel, sections: Sequence[Section]) -> Html:
    """Who ran what where, and the way through the page."""
    facts = [tag("div", tag("dt", fact.label), tag("dd", fact.value)) for fact in model.facts]
    links = [tag("li", tag("a", section.title, href=f"#{section.id}")) for section in sections]
    command = copyable(model.command, element_id="command", what="the command", class_="command")
    return join(
        tag("p", KINDS[model.kind], class_="eyebrow"),
        tag("h1", model.title or "untitled"),
        tag("dl", *facts, class_="facts") if facts else None,
        command if model.command else None,
        tag("nav", tag("ul", *links), aria_label="Sections"),
    )


def banner(model: ReportModel) -> Html | None:
    """Nothing protected this run: say it first, with the cure."""
    if model.protected:
        return None
    return tag(
        "section",
        tag("h2", "\u26a0 UNPROTECTED", id="unprotected-title"),
        tag("p", "The script ran unchanged and was not checkpointed. autockpt run ends by printing "
            "the lines to add, with the script's own names. With the usual names they are:"),
        copyable("\n".join(ATTACH_LINES), element_id="attach-lines", what="the lines"),
        class_="banner",
        aria_labelledby="unprotected-title",
    )  # fmt: skip


def verdict(model: ReportModel) -> Html:
    """One sentence, what it is worth, how sure we are."""
    said = model.verdict
    reason = f" ({said.confidence_reason})."
    confidence = tag("p", "Confidence: ", tag("b", said.confidence), reason, class_="lead")
    return tag(
        "section",
        tag("h2", prose(said.headline), id="verdict-title"),
        tag("p", prose(said.detail)),
        confidence,
        _next(model),
        class_=f"verdict {said.tone}",
        id="verdict",
        aria_labelledby="verdict-title",
    )


def _next(model: ReportModel) -> Html | None:
    """The one thing to do first, when there is something to do."""
    worst = model.findings[0] if model.findings else None
    if worst is None or worst.passed or worst.severity == "low":
        return None
    link = tag("a", worst.title, href=f"#finding-{worst.id}")
    return tag("p", "Look at first: ", link, ".", class_="next")


def tiles(model: ReportModel) -> Html | None:
    """Key figures, each with today's value or the promise."""
    if not model.tiles:
        return None
    boxes = [
        tag(
            "div",
            tag("dt", tile.label),
            tag("dd", prose(tile.value),
                class_="value words" if len(tile.value) > LONG_VALUE else "value"),
            tag("dd", prose(tile.note), class_="note"),
        )
        for tile in model.tiles
    ]  # fmt: skip
    return tag("dl", *boxes, class_="tiles", aria_label="Key figures")
