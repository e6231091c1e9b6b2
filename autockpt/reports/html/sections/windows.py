"""Idle windows: one iteration of each rank with the chunks that moved in them, and why not more."""

from autockpt.reports.analysis.idle_windows import RankUse, Windows
from autockpt.reports.html.charts import gantt
from autockpt.reports.html.escape import Child, join, tag
from autockpt.reports.html.sections.parts import Section, chart, duration, fraction, table
from autockpt.reports.model import ReportModel
from autockpt.values.units import format_bytes

HEADS = (
    "", "windows", "idle in them", "longest", "snapshots", "moved inside", "waited for",
    "chunk", "why not",
)  # fmt: skip


def section(model: ReportModel) -> Section | None:
    """Chart and table, None where no windows were looked for."""
    shown = model.windows
    if shown is None:
        return None
    body = join(
        tag("p", _lead(shown), class_="lead"),
        chart(gantt.draw(shown.iteration), gantt.legend(shown.iteration))
        if shown.iteration.rows
        else None,
        table(HEADS, [_row(rank) for rank in shown.ranks],
              caption="Windows of an iteration by rank", numbers=tuple(range(1, 8))),
        _compared(shown),
    )  # fmt: skip
    return Section(id="windows", title="Idle windows", body=body)


def _compared(shown: Windows) -> Child:
    """Schedules that took turns: expected and observed cost of a snapshot."""
    rows = [
        (cost.schedule, duration(cost.expected_s), duration(max(0.0, cost.observed_s)),
         duration(cost.error_s), str(cost.tries))
        for cost in shown.compared
    ]  # fmt: skip
    if not rows:
        return None
    head = ("snapshots copied", "expected to cost", "cost", "standard error", "tries")
    return table(head, rows, caption="Training time of a snapshot, stall included, by schedule",
                 numbers=(1, 2, 3, 4))  # fmt: skip


def _lead(shown: Windows) -> str:
    name = f"{shown.schedule}: " if shown.schedule else ""
    if not shown.step:
        return (
            f"{name}where each rank computes nothing in an iteration, as measured; lengths are "
            "10th percentiles, the chart shows medians."
        )
    return (
        f"{name}the iteration after step {shown.step}, from one optimizer's step to the next: the "
        "time in which each rank computed nothing, and the chunks of the checkpoint."
    )


def _row(rank: RankUse) -> tuple[Child, ...]:
    return (
        f"rank {rank.rank}",
        str(rank.windows),
        duration(rank.idle_s),
        duration(rank.longest_s),
        str(rank.snapshots),
        fraction(rank.window_share),
        fraction(rank.fence_share),
        format_bytes(rank.chunk_bytes) if rank.chunk_bytes else "\u2013",
        rank.why_not,
    )
