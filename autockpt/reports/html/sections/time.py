"""Where time goes: in all, in one checkpoint (hidden or exposed), in one iteration."""

from collections.abc import Mapping, Sequence

from autockpt.reports.analysis.accounting import Accounting
from autockpt.reports.analysis.saves import waits
from autockpt.reports.analysis.what_if import terms
from autockpt.reports.findings import FEW_SAMPLES
from autockpt.reports.html.charts import iterations, where_time
from autockpt.reports.html.escape import Child, join, tag
from autockpt.reports.html.sections.parts import Section, chart, details, duration, fraction, table
from autockpt.reports.model import ReportModel
from autockpt.values.profile import Profile
from autockpt.values.units import format_duration, format_multiple


def section(model: ReportModel) -> Section | None:
    """The accounting of a run, or the prediction of a profile."""
    parts: list[Child] = []
    if model.accounting is not None:
        parts += _of_run(model)
    elif model.what_if is not None:
        parts += _predicted(model.what_if.point)
    parts.append(_checkpoint(model))
    if model.profile is not None:
        parts += _iteration(model.profile, model.accounting)
    body = join(*parts)
    return Section(id="time", title="Where time goes", body=body) if body else None


def _of_run(model: ReportModel) -> list[Child]:
    accounting = model.accounting
    assert accounting is not None
    parts = accounting.parts()
    promised = terms(model.what_if.point) if model.what_if else {}
    rows: list[Sequence[Child]] = [
        (
            where_time.LABELS[name],
            duration(seconds),
            fraction(seconds / accounting.wall_s if accounting.wall_s else None),
            fraction(promised.get(name)),
        )
        for name, seconds in parts.items()
    ]
    rows.append(("wall time", duration(accounting.wall_s), fraction(1.0), ""))
    split = (
        f"Down time: detect {format_duration(accounting.detect_s)}, "
        f"restart {format_duration(accounting.restart_s)}, "
        f"restore {format_duration(accounting.restore_s)}. "
        if accounting.down_s
        else ""
    )
    pause = (
        f"Pauses of {format_duration(accounting.paused_s)} between runs are not counted."
        if accounting.paused_s
        else ""
    )
    return [
        chart(where_time.draw(parts), where_time.legend(parts)),
        tag("p", (split + pause).rstrip(), class_="lead") if accounting.down_s or pause else None,
        details(
            "Same data as a table",
            table(("", "time", "share", "promised"), rows, caption="Wall time by purpose",
                  numbers=(1, 2, 3)),
        ),
    ]  # fmt: skip


def _predicted(point: Mapping[str, float]) -> list[Child]:
    lost = terms(point)
    parts = {"productive": max(0.0, 1.0 - sum(lost.values())), **lost}
    rows = [(where_time.LABELS[name], fraction(value)) for name, value in parts.items()]
    return [
        tag("p", "Predicted for a long run under the plan, failures included.", class_="lead"),
        chart(where_time.draw(parts, whole="time"), where_time.legend(parts)),
        details("Same data as a table",
                table(("", "share"), rows, caption="Time by purpose, predicted", numbers=(1,))),
    ]  # fmt: skip


def _checkpoint(model: ReportModel) -> Child:
    """One checkpoint: the part that training waits for, and the hidden part."""
    stall, copy, durable = _measured(model)
    rows: list[Sequence[Child]] = []
    sync = waits(model.decision)
    blocks = "blocks training"
    background = blocks if sync else "beside training"
    until = "until durable" if sync else "at the boundary, and for the copy"
    for name, seen, kind in (
        (f"training waits ({until})", stall, blocks),
        ("copied to host memory", copy, background),
        ("durable on disk", durable, background),
    ):
        if seen is not None:
            rows.append((name, *[format_duration(value) for value in seen], kind))
    if not rows:
        return None
    words = ""
    if stall and durable and durable[0] > 0:
        words = _in_words(stall, copy, durable, sync=sync)
    last = "max" if model.kind == "run" else "mean"
    return join(
        tag("h3", "One checkpoint"),
        tag("p", words) if words else None,
        table(("from the boundary until", "median", "p95", last, ""), rows,
              caption="Observed in this run" if model.kind == "run" else "Measured on this job",
              numbers=(1, 2, 3)),
    )  # fmt: skip


Triple = tuple[float, float, float]


def _in_words(stall: Triple, copy: Triple | None, durable: Triple, *, sync: bool) -> str:
    """The medians in a sentence."""
    longest = "write" if copy and copy[0] < durable[0] / 2 else "copy"
    if sync:
        return (
            f"Training waits until the checkpoint is durable, {format_duration(stall[0])}, most "
            f"of it for the {longest}."
        )
    return (
        f"Training waits {format_duration(stall[0])} and goes on. The checkpoint is durable "
        f"{format_duration(durable[0])} after it began; most of that is the {longest}."
    )


def _measured(model: ReportModel) -> tuple[Triple | None, Triple | None, Triple | None]:
    """Median, p95 and a third figure of stall, copy and durable."""
    if model.saves is not None:
        spreads = (model.saves.stall, model.saves.copy, model.saves.durable)
        found = [(s.p50_s, s.p95_s, s.max_s) if s else None for s in spreads]
    elif model.profile is not None:
        profile = model.profile
        stall_s = profile.persist_s if waits(model.decision) else profile.stall_s
        times = (stall_s, profile.snapshot_s, profile.persist_s)
        found = [(d.p50, d.p95, d.mean) if d else None for d in times]
    else:
        found = [None, None, None]
    return found[0], found[1], found[2]


def _iteration(profile: Profile, accounting: Accounting | None) -> list[Child]:
    """The spread of iterations; of a run that measured few of them, its own mean."""
    if accounting is not None and profile.iteration_s.n < FEW_SAMPLES:
        if not accounting.steps or accounting.productive_s <= 0:
            return []
        mean = format_duration(accounting.productive_s / accounting.steps)
        return [tag("h3", "One iteration"),
                tag("p", f"{mean} on average of {accounting.steps} iterations.")]  # fmt: skip
    samples = profile.samples
    phases = profile.phases_s
    rows = [
        (
            name.replace("_", " "),
            format_duration(phase.p50),
            format_duration(phase.p95),
            fraction(phase.p50 / profile.iteration_s.p50 if profile.iteration_s.p50 else None),
        )
        for name, phase in phases.items()
    ]
    spread = _spread(profile)
    # A run that is measured in place tells means of its blocks, not every iteration.
    counted = "blocks of a second or more" if "busy_iteration_s" in samples else "iterations"
    return [
        tag("h3", "One iteration"),
        tag("p", f"{format_duration(profile.iteration_s.p50)} in the median of "
            f"{profile.iteration_s.n} {counted}{spread}."),
        chart(iterations.draw(profile.iteration_s, samples.get("iteration_s", ()),
                              counted=counted)),
        table(("phase", "median", "p95", "share"), rows, caption="Phases of an iteration",
              numbers=(1, 2, 3)) if rows else None,
    ]  # fmt: skip


def _spread(profile: Profile) -> str:
    iteration_s = profile.iteration_s
    if iteration_s.p50 <= 0:
        return ""
    wide = (iteration_s.p90 - iteration_s.p10) / iteration_s.p50
    return f", p10 to p90 spans {format_multiple(wide)} of it"
