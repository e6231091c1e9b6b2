"""Times of each restart: process, imports, rendezvous, restore, first iteration."""

from autockpt.reports.analysis.restarts import LABELS
from autockpt.reports.html.charts import restart as chart_of
from autockpt.reports.html.escape import Child, join, tag
from autockpt.reports.html.sections.parts import chart, duration, table
from autockpt.reports.model import ReportModel
from autockpt.values.units import format_duration

PROCESSES = {"new": "new", "parked": "parked before", "same": "the same"}
"""By `RunStarted.process`."""
SHOWN = 4
"""The newest; more columns would not fit a page."""


def restarts(model: ReportModel) -> Child:
    """Bars and a table, None when nothing was restarted."""
    shown = model.restarts[-SHOWN:]
    if not shown:
        return None
    rows = [
        (label, *[duration(restart.parts.get(name)) for restart in shown])
        for name, label in LABELS.items()
        if any(name in restart.parts for restart in shown)
    ]
    rows.append(("failure to first iteration", *[duration(r.total_s) for r in shown]))
    if any(restart.process for restart in shown):
        rows.append(("process", *[PROCESSES.get(one.process, "\u2013") for one in shown]))
    reason = shown[-1].new_process_reason
    heads = ("", *[f"failed after {format_duration(restart.failed_at_s)}" for restart in shown])
    unknown = any(None in restart.parts.values() for restart in shown)
    gain = model.next_gain
    left = len(model.restarts) - len(shown)
    return join(
        tag("h3", "Restarts"),
        tag("p", f"The newest {len(shown)} of {len(model.restarts)} restarts.", class_="lead")
        if left
        else None,
        chart(chart_of.draw(shown), chart_of.legend()),
        table(heads, rows, caption=f"Parts of a restart, rank {shown[-1].rank}",
              numbers=tuple(range(1, len(heads)))),
        tag("p", f"Rank {shown[-1].rank} survived, and has a new process: {reason}.",
            class_="lead") if reason else None,
        tag("p", f"The cheapest next gain, up to {format_duration(gain.seconds)}: {gain.remedy}.",
            class_="lead") if gain else None,
        tag("p", "\u2013 was not told apart: a launcher that is not ours is contained in the first "
            "row; interpreter, torch and process group in the script's, as without autockpt run.",
            class_="lead") if unknown else None,
    )  # fmt: skip
