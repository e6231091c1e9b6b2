"""Two runs side by side: differences of policy and machine, costs, losses, and the better one.

Both models come from `model.build`, so each figure is the one of the run's own report.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autockpt.reports.model import ReportModel
from autockpt.values.errors import ConfigError
from autockpt.values.units import format_duration, format_fraction

EQUAL = 1e-3
"""Shares of lost time that differ by less, in fractions of the time, make neither run better."""

Show = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity of both runs, for people."""

    group: str
    """policy, job, machine, software, outcome, failures or costs."""
    label: str
    first: str
    second: str
    difference: str = ""
    """Second minus first, with its sign; "": it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs and the answer to which one did better."""

    schema_version: int = 1
    names: tuple[str, str]
    verdict: str
    """One or two sentences: the better run, by how much, and the reason for care."""
    better: str
    """Name of the better run; "": neither is."""
    rows: tuple[Row, ...]


def compare(first: ReportModel, second: ReportModel) -> Comparison:
    """Compare two runs.  Raises ConfigError where one has trained nothing yet."""
    for model in (first, second):
        if model.accounting is None or not model.accounting.steps:
            raise ConfigError(
                f"{model.title}: has no telemetry of a training, so nothing can be compared; "
                "expected: two directories of autockpt run that have trained"
            )
    setting = (*_policy(first, second), *_given(first, second))
    better, verdict = _verdict(first, second, [row for row in setting if row.group != "policy"])
    return Comparison(
        names=(first.title, second.title),
        verdict=verdict,
        better=better,
        rows=(*setting, *_outcome(first, second), *_costs(first, second)),
    )


def _verdict(first: ReportModel, second: ReportModel, given: list[Row]) -> tuple[str, str]:
    """(the better run, the sentences about it)."""
    assert first.accounting is not None
    assert second.accounting is not None
    lost = (first.accounting.waste, second.accounting.waste)
    told = (
        f"{first.title} lost {format_fraction(lost[0])} of its time after start-up to checkpoints "
        f"and failures, {second.title} {format_fraction(lost[1])}"
    )
    better = ""
    if abs(lost[0] - lost[1]) < EQUAL:
        told += f": they differ by less than {_points(EQUAL)}."
    else:
        better = (first if lost[0] < lost[1] else second).title
        told += f": {better} is better by {_points(abs(lost[0] - lost[1]))}."
    if given:
        names = ", ".join(row.label for row in given)
        what = "machines" if {row.group for row in given} == {"machine"} else "settings"
        told += f" Compare with care: the {what} differ ({names})."
    ends = [_end(model) for model in (first, second)]
    if ends[0] != ends[1]:
        told += f" The ends differ ({ends[0]} and {ends[1]})."
    deaths = [_failures(model) for model in (first, second)]
    if deaths[0] != deaths[1]:
        told += f" The failures differ ({deaths[0]} and {deaths[1]}), which no policy decides."
    return better, told


def _policy(first: ReportModel, second: ReportModel) -> tuple[Row, ...]:
    chosen = (_chosen(first), _chosen(second))
    names = dict.fromkeys((*chosen[0], *chosen[1]))
    return _differing("policy", names, *chosen)


def _chosen(model: ReportModel) -> dict[str, str]:
    """The choices of the plan in force."""
    if model.decision is None:
        return {"plan": "defaults"}
    return {choice.name: choice.chosen for choice in model.decision.choices}


def _given(first: ReportModel, second: ReportModel) -> tuple[Row, ...]:
    """Differences that no policy decides, of quantities known of both runs."""
    rows: tuple[Row, ...] = ()
    for group, of in (("job", _job), ("machine", _machine), ("software", _software)):
        one, other = of(first), of(second)
        rows += _differing(group, [name for name in one if name in other], one, other)
    return rows


def _job(model: ReportModel) -> dict[str, str]:
    """The command, its ranks and its state."""
    facts = {fact.label: fact.value for fact in model.facts}
    job = {"command": model.command} if model.command else {}
    if "Ranks" in facts:
        job["ranks"] = facts["Ranks"].split()[0]  # only a profile tells the nodes, too
    if "State" in facts:
        job["state"] = facts["State"]
    return job


def _machine(model: ReportModel) -> dict[str, str]:
    """Hardware and storage, where a profile told them."""
    if model.profile is None:
        return {}
    mark = model.profile.fingerprint
    return {
        "processor": f"{mark.cpu}, {mark.cores} cores",
        "GPUs": f"{len(mark.gpus)} x {mark.gpus[0]}" if mark.gpus else "none",
        "nodes": str(mark.nodes),
        "storage": mark.storage,
    }


def _software(model: ReportModel) -> dict[str, str]:
    return {f"{name} version": model.versions[name] for name in ("torch", "autockpt")
            if name in model.versions}  # fmt: skip


def _differing(
    group: str, names: Iterable[str], first: dict[str, str], second: dict[str, str]
) -> tuple[Row, ...]:
    """A row for each of these keys whose values differ."""
    return tuple(
        Row(group=group, label=name, first=first.get(name, "-"), second=second.get(name, "-"))
        for name in names
        if first.get(name) != second.get(name)
    )


def _outcome(first: ReportModel, second: ReportModel) -> tuple[Row, ...]:
    ends = [_end(model) for model in (first, second)]
    deaths = [str(_failures(model)) for model in (first, second)]
    steps = [str(_lost_steps(model)) for model in (first, second)]
    return (
        Row(group="outcome", label="end", first=ends[0], second=ends[1]),
        Row(group="failures", label="failures", first=deaths[0], second=deaths[1]),
        Row(group="failures", label="steps lost", first=steps[0], second=steps[1]),
    )


def _end(model: ReportModel) -> str:
    return model.ending.state if model.ending else "not ended"


def _failures(model: ReportModel) -> int:
    """Failures that it came back from, and the one that ended it."""
    last = model.ending is not None and model.ending.state == "failed"
    return sum(r.deaths for r in model.restores if r.failed_at_s is not None) + last


def _lost_steps(model: ReportModel) -> int:
    """Trained again, or gone with the end."""
    at_end = model.ending.lost_steps if model.ending is not None else 0
    return sum(r.lost_steps for r in model.restores) + at_end


def _costs(first: ReportModel, second: ReportModel) -> tuple[Row, ...]:
    a, b = first.accounting, second.accounting
    assert a is not None
    assert b is not None
    rows = [
        _row("wall time", a.wall_s, b.wall_s, format_duration),
        _row("training that counts", a.goodput, b.goodput, format_fraction),
        _row("lost after start-up", a.waste, b.waste, format_fraction),
        _row("of it to checkpoints", a.checkpoint_waste, b.checkpoint_waste, format_fraction),
        _row("lost work", a.lost_s, b.lost_s, format_duration),
        _row("down time", a.down_s, b.down_s, format_duration),
    ]
    for label, spreads in (
        ("stall, median", [m.saves.stall if m.saves else None for m in (first, second)]),
        (
            "time to durable, median",
            [m.saves.durable if m.saves else None for m in (first, second)],
        ),
    ):
        medians = [spread.p50_s for spread in spreads if spread is not None]
        if len(medians) == 2:
            rows.append(_row(label, medians[0], medians[1], format_duration))
    return tuple(rows)


def _row(label: str, first: float, second: float, show: Show) -> Row:
    change = second - first
    size = show(abs(change)) if show is format_duration else _points(abs(change))
    sign = "+" if change > 0 else "-"
    return Row(
        group="costs", label=label, first=show(first), second=show(second),
        difference=f"{sign}{size}" if show(first) != show(second) else "same",
    )  # fmt: skip


def _points(difference: float) -> str:
    """A difference of two percentages."""
    return f"{difference * 100:.3g} points"
