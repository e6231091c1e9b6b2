"""The run over time, its failures and restores, the promises it kept."""

from autockpt.reports.analysis.promises import FACTOR, Promise
from autockpt.reports.analysis.replication import facts
from autockpt.reports.html.charts import gantt
from autockpt.reports.html.escape import Child, Html, join, tag
from autockpt.reports.html.sections.parts import Section, chart, details, duration, fraction, table
from autockpt.reports.html.sections.restarts import restarts
from autockpt.reports.model import ReportModel
from autockpt.values.units import format_bytes, format_duration

VERDICTS = {
    "kept": ("\u2713 kept", "ok"),
    "better": ("\u2713 better", "ok"),
    "broken": ("\u2715 broken", "no"),
    "not yet": ("too early", "dim"),
}


def timeline(model: ReportModel) -> Section | None:
    """Gantt chart, restores, plan changes, how much was at stake."""
    data = model.timeline
    if data is None or not data.rows:
        return None
    rows = [(format_duration(mark.at_s), mark.kind, mark.text) for mark in data.marks]
    left = f", {data.marks_left_out} left out" if data.marks_left_out else ""
    notes = []
    if data.ranks_per_row > 1:
        notes.append(f"Each row stands for {data.ranks_per_row} ranks.")
    if data.every > 1:
        notes.append(f"One checkpoint in {data.every} is drawn.")
    body = join(
        chart(gantt.draw(data), gantt.legend(data)),
        tag("p", " ".join(notes), class_="lead") if notes else None,
        details(f"Same data as a table ({len(rows)} events{left})",
                table(("after", "what", ""), rows, caption="What happened")) if rows else None,
        _restores(model),
        restarts(model),
        _checkpoints(model),
        _copies(model),
        _changes(model),
    )  # fmt: skip
    return Section(id="timeline", title="Timeline", body=body)


def promises(model: ReportModel) -> Section | None:
    """Promised against observed."""
    if not model.promises:
        return None
    rows = [_promise(promise) for promise in model.promises]
    return Section(
        id="promises",
        title="Promised and observed",
        body=join(
            tag("p", f"A promise is broken when the run shows more than {FACTOR:g} times the "
                "figure of the plan.", class_="lead"),
            table(("", "promised", "observed", "", "n", "what was compared"), rows,
                  caption="Figures of the plan", numbers=(1, 2, 4)),
        ),
    )  # fmt: skip


def _promise(promise: Promise) -> tuple[Child, ...]:
    show = duration if promise.unit == "s" else fraction
    words, class_ = VERDICTS[promise.verdict]
    return (
        promise.label,
        show(promise.promised),
        show(promise.observed),
        tag("span", words, class_=class_),
        str(promise.n),
        promise.note,
    )


def _restores(model: ReportModel) -> Child:
    rows = [
        (
            format_duration(r.at_s),
            r.what or "resumed an earlier run",
            r.source or "from scratch",
            f"step {r.step}",
            f"{r.lost_steps} steps, {format_duration(r.lost_s)}" if r.lost_steps else "nothing",
            format_duration(r.down_s) if r.down_s else "–",
            r.replay or "–",
        )
        for r in model.restores
    ]
    if not rows:
        return None
    head = ("resumed after", "lost", "restored from", "at", "work lost", "down",
            "random numbers as before")  # fmt: skip
    return join(tag("h3", "Failures and restores"),
                table(head, rows, caption="Each interruption and what it cost",
                      numbers=(5,)))  # fmt: skip


def _checkpoints(model: ReportModel) -> Child:
    saves = model.saves
    if saves is None or not saves.sealed + saves.skipped:
        return None
    counts = (
        f"{saves.memory_committed} checkpoints reached memory, {saves.disk_committed} the disk; "
        f"{saves.skipped} skipped, {saves.discarded} discarded, {saves.failed} failed, "
        f"{saves.retired} retired."
    )
    size = ""
    if saves.state_bytes:
        size = f" The newest on disk takes {format_bytes(saves.stored_bytes)}."
    ages = [
        (a.tier, f"step {a.step}", str(a.age_steps), duration(a.age_s), duration(a.worst_s))
        for a in model.ages
    ]
    reasons = [(reason, str(count)) for reason, count in saves.reasons.items()]
    return join(
        tag("h3", "Checkpoints"),
        tag("p", counts + size),
        table(("tier", "newest", "steps behind", "age at the end", "largest age"), ages,
              caption="What a failure would have cost", numbers=(2, 3, 4)) if ages else None,
        table(("why not", "checkpoints"), reasons, caption="Skipped, discarded or failed",
              numbers=(1,)) if reasons else None,
    )  # fmt: skip


def _copies(model: ReportModel) -> Child:
    copies = model.protection
    if copies is None:
        return None
    return join(
        tag("h3", "Copies on other nodes"),
        table(("", ""), facts(copies), caption="What the loss of a node would have left"),
    )


def _changes(model: ReportModel) -> Html | None:
    if not model.changes:
        return None
    rows = [
        (
            f"version {c.plan_version}",
            format_duration(c.at_s),
            f"step {c.step}",
            f"{c.memory_interval_steps} / {c.disk_interval_steps} steps",
            c.reason,
        )
        for c in model.changes
    ]
    return join(tag("h3", "Plan changes"),
                table(("plan", "after", "from", "memory / disk every", "why"), rows,
                      caption="Each plan, since when, and why", numbers=(1, 2, 3)))  # fmt: skip
