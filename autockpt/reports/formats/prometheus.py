"""The newest figures in Prometheus' text format, for node_exporter's textfile collector.

Source: Prometheus exposition formats, text format 0.0.4: HELP and TYPE once per metric, then its
samples; label values escape backslash, double quote and line feed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autockpt.reports.analysis.replication import Protection
from autockpt.reports.analysis.saves import Saves, Spread
from autockpt.reports.html.escape import plain
from autockpt.reports.model import ReportModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric and its samples: labels -> value."""

    name: str
    help: str
    kind: str = "gauge"
    samples: tuple[tuple[Mapping[str, str], float], ...] = field(default=())


def render(model: ReportModel) -> str:
    """The text; every sample carries the title of the run."""
    run = {"run": model.title}
    lines: list[str] = []
    for metric in _metrics(model):
        kept = [(labels, value) for labels, value in metric.samples if not math.isnan(value)]
        if kept:
            name = f"autockpt_{metric.name}"
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
            lines += [f"{name}{_labels({**run, **labels})} {_number(v)}" for labels, v in kept]
    return "\n".join(lines) + "\n" if lines else ""


def _metrics(model: ReportModel) -> Iterable[Metric]:
    yield Metric(name="protected", help="1 if the training state is checkpointed.",
                 samples=(({}, float(model.protected)),))  # fmt: skip
    if model.decision is not None:
        expected, plan = model.decision.expected, model.decision.plan
        yield Metric(name="expected_waste_ratio", help="Fraction of time the plan expects to lose.",
                     samples=(({}, expected.waste),))  # fmt: skip
        yield Metric(name="interval_steps", help="Iterations between checkpoints, 0 if off.",
                     samples=tuple(({"tier": t.tier}, t.interval_steps)
                                   for t in plan.tiers))  # fmt: skip
    if model.accounting is not None:
        parts = model.accounting.parts()
        yield Metric(name="goodput_ratio", help="Productive share of wall time.",
                     samples=(({}, model.accounting.goodput),))  # fmt: skip
        yield Metric(name="time_seconds", help="Wall time by purpose.",
                     samples=tuple(({"purpose": k}, v) for k, v in parts.items()))  # fmt: skip
        yield Metric(name="steps_total", help="Iterations trained, repeated ones included.",
                     kind="counter", samples=(({}, model.accounting.steps),))  # fmt: skip
        yield Metric(name="restores_total", help="Interruptions survived, by source.",
                     kind="counter", samples=_by_source(model))  # fmt: skip
    if model.saves is not None:
        yield from _saves(model.saves)
    if model.protection is not None:
        yield from _copies(model.protection)
    yield Metric(name="storage_failing", help="1 if checkpoints do not reach the disk now.",
                 samples=(({}, float(model.disk_failing)),))  # fmt: skip
    yield Metric(name="replicas_disagreed_total", kind="counter",
                 help="Checkpoints on which ranks that hold the same state disagreed.",
                 samples=(({}, model.disputed_count),))  # fmt: skip
    yield Metric(name="recoverable_age_seconds", help="Work a failure would cost now, by tier.",
                 samples=tuple(({"tier": a.tier}, a.age_s) for a in model.ages))  # fmt: skip
    yield Metric(name="recoverable_age_steps", help="The same in iterations.",
                 samples=tuple(({"tier": a.tier}, a.age_steps) for a in model.ages))  # fmt: skip


def _saves(saves: Saves) -> Iterable[Metric]:
    outcomes = {
        "sealed": saves.sealed,
        "memory": saves.memory_committed,
        "disk": saves.disk_committed,
        "skipped": saves.skipped,
        "discarded": saves.discarded,
        "failed": saves.failed,
    }
    yield Metric(name="checkpoints_total", help="Checkpoints by outcome.", kind="counter",
                 samples=tuple(({"outcome": k}, v) for k, v in outcomes.items()))  # fmt: skip
    yield Metric(name="stall_seconds", help="Training blocked by one checkpoint.",
                 kind="summary", samples=_quantiles(saves.stall))  # fmt: skip
    yield Metric(name="durable_seconds", help="Boundary to durable on disk.",
                 kind="summary", samples=_quantiles(saves.durable))  # fmt: skip


def _copies(copies: Protection) -> Iterable[Metric]:
    yield Metric(name="protected_step", help="Newest step that survives the loss of a node.",
                 samples=(({}, math.nan if copies.newest_step is None else copies.newest_step),),
                 )  # fmt: skip
    yield Metric(name="copies_wanted", help="Copies or parities that other nodes should hold.",
                 samples=(({}, copies.copies_wanted),))  # fmt: skip
    yield Metric(name="copies_held", help="Those of the newest protected checkpoint.",
                 samples=(({}, copies.copies_held),))  # fmt: skip
    yield Metric(name="protection_degraded", help="1 if copies on other nodes are missing.",
                 samples=(({"reason": copies.degraded}, float(bool(copies.degraded))),),
                 )  # fmt: skip
    yield Metric(name="protected_seconds", help="Snapshot to copies on other nodes.",
                 kind="summary", samples=_quantiles(copies.latency))  # fmt: skip
    moved = {"protect": copies.copied_bytes, "restore": copies.fetched_bytes}
    yield Metric(name="peer_bytes_total", help="Bytes of checkpoints between nodes.",
                 kind="counter",
                 samples=tuple(({"purpose": k}, v) for k, v in moved.items()))  # fmt: skip


def _quantiles(spread: Spread | None) -> tuple[tuple[Mapping[str, str], float], ...]:
    if spread is None:
        return ()
    return (
        ({"quantile": "0.5"}, spread.p50_s),
        ({"quantile": "0.95"}, spread.p95_s),
        ({"quantile": "1"}, spread.max_s),
    )


def _by_source(model: ReportModel) -> tuple[tuple[Mapping[str, str], float], ...]:
    counts = {"memory": 0, "disk": 0, "scratch": 0}
    for restore in model.restores:
        if restore.failed_at_s is not None:
            source = restore.source or "scratch"
            counts[source] = counts.get(source, 0) + 1
    return tuple(({"source": source}, float(count)) for source, count in counts.items())


def _labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{_escape(value)}"' for name, value in labels.items()]
    return "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    clean = plain(value).replace("\\", "\\\\").replace('"', '\\"')
    return clean.replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
