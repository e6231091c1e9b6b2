"""Uncertainties: the failure rate, the forecast of a month, the effect of another rate."""

from autockpt.reports.analysis.risk import BAND, Risk, sensitivity
from autockpt.reports.analysis.what_if import WhatIfCurve
from autockpt.reports.data import reckoned_with
from autockpt.reports.html.charts import luck
from autockpt.reports.html.escape import Child, Html, join, tag
from autockpt.reports.html.sections.parts import Section, chart, details, duration, table
from autockpt.reports.model import ReportModel
from autockpt.values.plan import Decision
from autockpt.values.profile import FailureRates, RecoveryTimes
from autockpt.values.units import format_duration, format_fraction


def section(model: ReportModel) -> Section | None:
    """Failure model, Monte Carlo band, sensitivity."""
    known = reckoned_with(model.profile, model.decision)
    if known is None:
        return None
    body = join(
        _spread(model.risk) if model.risk is not None else None,
        _sensitivity(model.what_if) if model.what_if is not None else None,
        _failures(*known, model.what_if, declared=_is_declared(model.decision)),
    )
    return Section(id="risk", title="Risk", body=body)


def _spread(risk: Risk) -> Html:
    low, middle, high = (format_duration(s) for s in risk.mtbf_s)
    rows = [
        (way.name, *(format_fraction(way.quantile(q)) for q in (BAND[0], 0.5, BAND[1])),
         format_fraction(sum(way.lost) / len(way.lost)), format_fraction(way.promised))
        for way in risk.ways
    ]  # fmt: skip
    head = ("", "5 %", "median", "95 %", "mean", "promised")
    return join(
        tag("p", risk.sentence()),
        tag(
            "p",
            "Each simulated run draws a failure rate from what is known of it (between one failure "
            f"in {low} and one in {high}, median {middle}) and then the failures themselves "
            f"({risk.failures[0]} to {risk.failures[2]} of them); both plans meet the "
            "same failures. "
            "The promise is the formula's mean for the mean rate.",
            class_="lead",
        ),
        chart(luck.draw(risk), luck.legend()),
        details(
            "Same data as a table",
            table(head, rows, caption=f"{risk.worlds} simulated runs, seed {risk.seed}",
                  numbers=(1, 2, 3, 4, 5)),
        ),
    )  # fmt: skip


def _sensitivity(curve: WhatIfCurve) -> Html:
    rows = [
        (_times(times), format_duration(curve.point["mtbf_s"] / times),
         format_fraction(mine), format_fraction(best), _more(mine - best))
        for times, mine, best in sensitivity(curve)
    ]  # fmt: skip
    head = ("failures come", "one in", "this plan loses", "the best would", "difference")
    return join(
        tag("h3", "If the failure rate is another one"),
        table(head, rows, numbers=(1, 2, 3, 4),
              caption="By the formula; the best intervals then, before limits and rounding"),
    )  # fmt: skip


def _times(factor: float) -> str:
    return "as the plan reckons" if factor == 1.0 else f"{factor:g} times as often"


def _more(waste: float) -> str:
    """A thousandth of a percent is rounding to whole iterations."""
    return format_fraction(waste) if waste > 1e-5 else "\u2013"


def _is_declared(decision: Decision | None) -> bool:
    inputs = decision.inputs if decision is not None else None
    return inputs is None or inputs.declared_mtbf_s is not None


def _failures(
    rates: FailureRates, recovery: RecoveryTimes, curve: WhatIfCurve | None, *, declared: bool
) -> Html:
    """Failure model and recovery times, with their sources."""
    estimated = rates.interruptions_per_s
    mtbf_s = 1 / estimated if estimated > 0 else None
    rows: list[tuple[Child, ...]] = [
        ("training between failures of the job", duration(mtbf_s),
         f"{rates.per_node.source}; {rates.per_job.source}"),
        ("failures that leave memory alive", format_fraction(rates.process_share), ""),
    ]  # fmt: skip
    if curve is not None and mtbf_s and abs(curve.point["mtbf_s"] / mtbf_s - 1) > 1e-6:
        share = format_fraction(curve.point["process_share"])
        why = "declared by the policy" if declared else "a failure each, outages included"
        rows.insert(0, ("the plan reckons with", duration(curve.point["mtbf_s"]),
                        f"{why}; {share} of them served from memory"))  # fmt: skip
    times = {
        "detect": recovery.detect,
        "restart": recovery.restart,
        "restore from memory": recovery.restore_memory,
        "restore from disk": recovery.restore_disk,
    }
    for name, estimate in times.items():
        how = estimate.source + (f", n {estimate.n}" if estimate.n else "")
        note = f"{how}; {estimate.note}" if estimate.note else how
        rows.append((name, format_duration(estimate.value_s), note))
    return join(
        tag("h3", "Failures and recovery"),
        table(("failure model", "value", "source"), rows, numbers=(1,),
              caption="What the plan reckons with, and where it comes from"),
    )  # fmt: skip
