"""The search for a way to write: history, importance, the best ways, the excluded ones."""

from autockpt.reports.analysis.search import SearchedWay, SearchHistory
from autockpt.reports.html.charts import search as chart_of
from autockpt.reports.html.escape import Child, Html, join, tag
from autockpt.reports.html.sections.parts import Section, chart, details, duration, fraction, table
from autockpt.reports.model import ReportModel
from autockpt.values.units import format_bytes, format_fraction

BEST = 10
"""Ways in the table."""


def section(model: ReportModel) -> Section | None:
    """The newest search of this profile."""
    history = model.search
    if history is None:
        return None
    body = join(
        tag("p", _verdict(history)),
        tag("p", history.reason[:1].upper(), history.reason[1:], ".", class_="lead"),
        chart(chart_of.draw(history), chart_of.legend()),
        _importances(history),
        tag("h3", f"The best {min(BEST, len(history.ways))} of {len(history.ways)} measured"),
        _ways(history.ways[:BEST]),
        _refused(history),
        tag("p", _method(history), class_="lead"),
    )
    return Section(id="search", title="Search", body=body)


def _verdict(history: SearchHistory) -> Html:
    if history.kept_default:
        return join("The way that runs untuned stays: ", tag("b", history.winner), ".")
    return join("Chosen: ", tag("b", history.winner), f" instead of {history.default}.")


def _importances(history: SearchHistory) -> Child:
    if not any(history.importances.values()):
        return None
    return join(
        tag("h3", "What mattered"),
        tag("p", "Share of the spread of write times that each knob explains; together they "
            f"explain {format_fraction(history.explained)} of it.", class_="lead"),
        chart(chart_of.importances(history)),
    )  # fmt: skip


def _ways(ways: tuple[SearchedWay, ...]) -> Html:
    rows = [
        (w.way, duration(w.predicted_s), duration(w.measured_s), str(w.writes), fraction(w.waste),
         w.note)
        for w in ways
    ]  # fmt: skip
    head = ("way to write", "predicted", "measured", "writes", "lost time", "")
    return table(head, rows, caption="Time until durable beside the training, and what the best "
                 "plan that writes so would lose", numbers=(1, 2, 3, 4))  # fmt: skip


def _refused(history: SearchHistory) -> Child:
    if not history.refused:
        return None
    rows = [(why, str(count)) for why, count in history.refused.items()]
    total = sum(history.refused.values())
    return details(f"{total} of {history.space} ways were not tried",
                   table(("why", "ways"), rows, caption="Left out", numbers=(1,)))  # fmt: skip


def _method(history: SearchHistory) -> str:
    older = f" {history.others} older search(es) lie beside it." if history.others else ""
    return (
        f"{len(history.writes)} of at most {history.budget} writes of "
        f"{format_bytes(history.sample_bytes)} a rank ({history.content}), proposed by "
        f"{history.proposer}, seed {history.seed}. Samples of the search do not count in the "
        f"final, where the best and the default took turns.{older}"
    )
