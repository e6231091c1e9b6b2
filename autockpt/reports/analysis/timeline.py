"""Who did what when: the data of the Gantt chart, small enough for one page.

Rows are ranks (groups of ranks above `ROWS`), then the disk.  Checkpoints that fall on one pixel
are drawn as one.  Of very many only every n-th is drawn, so that the chart stays within `SPANS`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autockpt.reports.analysis.accounting import Restore
from autockpt.values.telemetry import (
    CheckpointDurable,
    Degraded,
    Event,
    FailureObserved,
    LossyRestored,
    PersistFailed,
    PlanChanged,
    PlanChangeWithheld,
    ReplicaFetched,
    ReplicationLost,
    Restored,
    RunEnded,
    RunStarted,
    SaveSkipped,
    SnapshotDiscarded,
    SnapshotSealed,
    TrainerFailed,
)
from autockpt.values.units import format_bytes, format_duration

ROWS = 64
"""Ranks are grouped above this: more rows are unreadable."""
SPANS = 4000
"""Spans in the chart: some 60 KB of SVG and as much of data."""
CHECKPOINTS = ("copy", "persist")
"""Kinds of spans that may be thinned out."""
MARKS = 200
"""Marks and lines of the table; the first and the newest are kept."""
PIXELS = 900
"""The width of the chart."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank, a group of ranks, or the disk."""

    label: str
    spans: dict[str, tuple[float, ...]]
    """Kind (train, copy, persist, down, lost) -> start, end, start, end, ... in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at one moment."""

    at_s: float
    kind: str
    """failure, fetched, restore, plan, skipped, discarded, failed, degraded, start, end."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The run from 0 to `end_s` seconds, its training's end; marks may come later."""

    end_s: float
    rows: tuple[Row, ...]
    marks: tuple[Mark, ...]
    ranks: int
    ranks_per_row: int
    resolution_s: float
    """Checkpoints closer than this are one span."""
    every: int
    """Only every n-th checkpoint is drawn; 1: all."""
    marks_left_out: int


def timeline(events: Sequence[Event], restores: Sequence[Restore], start_s: float) -> Timeline:
    """The chart's data of aligned `events`; times count from `start_s`."""
    ranks = sorted({event.rank for event in events if event.rank >= 0})
    told = [event for event in events if _is_of_training(event)] or events
    end_s = max((event.at_s for event in told), default=start_s) - start_s
    per_row = max(1, -(-len(ranks) // ROWS))
    spans = _rank_spans(events, restores, start_s)
    groups = [ranks[i : i + per_row] for i in range(0, len(ranks), per_row)]
    raw: list[tuple[str, dict[str, list[Span]]]] = []
    for group in groups:
        merged: dict[str, list[Span]] = defaultdict(list)
        for rank in group:
            for kind, items in spans[rank].items():
                merged[kind] += items
        label = f"rank {group[0]}" if len(group) == 1 else f"ranks {group[0]}-{group[-1]}"
        raw.append((label, merged))
    if persisted := _persist_spans(events, start_s):
        raw.append(("disk", {"persist": persisted}))
    rows, resolution_s, every = _fit(raw, max(end_s, 0.0))
    marks = _marks(events, start_s)
    return Timeline(
        end_s=max(end_s, 0.0),
        rows=rows,
        marks=_ends(marks),
        ranks=len(ranks),
        ranks_per_row=per_row,
        resolution_s=resolution_s,
        every=every,
        marks_left_out=max(0, len(marks) - MARKS),
    )


def _is_of_training(event: Event) -> bool:
    """Whether an event is of the training: copies after the end must not stretch the chart."""
    return event.rank >= 0 or isinstance(event, CheckpointDurable | FailureObserved)


def _rank_spans(
    events: Sequence[Event], restores: Sequence[Restore], start_s: float
) -> dict[int, dict[str, list[Span]]]:
    """Training, copies, lost work and down time of each rank."""
    spans: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    began: dict[int, float] = {}
    last: dict[int, float] = {}
    failures = [e.at_s - start_s for e in events if isinstance(e, FailureObserved)]
    for event in events:
        rank, at_s = event.rank, event.at_s - start_s
        if rank < 0:
            continue
        if isinstance(event, RunStarted):
            _close(spans[rank]["train"], began.pop(rank, None), last.get(rank), failures)
            began[rank] = at_s
        began.setdefault(rank, at_s)
        last[rank] = at_s
        if isinstance(event, SnapshotSealed):
            spans[rank]["copy"].append((at_s - event.copy_s, at_s))
        elif isinstance(event, RunEnded):
            _close(spans[rank]["train"], began.pop(rank, None), at_s, ())
    for rank, at_s in began.items():
        _close(spans[rank]["train"], at_s, last.get(rank), failures)
    for restore in restores:
        for rank in spans:
            _add_restore(spans[rank], restore)
    return spans


def _close(
    spans: list[Span], began_s: float | None, last_s: float | None, failures: Sequence[float]
) -> None:
    """End a rank's life at the first failure after its last sign of life, else at that sign."""
    if began_s is not None and last_s is not None:
        ended_s = min((at_s for at_s in failures if at_s >= last_s), default=last_s)
        spans.append((began_s, ended_s))


def _add_restore(spans: dict[str, list[Span]], restore: Restore) -> None:
    if restore.failed_at_s is None:
        return
    began_s = restore.at_s - restore.down_s if restore.new_launch else restore.failed_at_s
    spans["down"].append((began_s, restore.at_s))
    if restore.lost_s > 0:
        spans["lost"].append((max(0.0, restore.failed_at_s - restore.lost_s), restore.failed_at_s))


def _persist_spans(events: Sequence[Event], start_s: float) -> list[Span]:
    commits = (e for e in events if isinstance(e, CheckpointDurable))
    return [(e.at_s - start_s - e.latency_s, e.at_s - start_s) for e in commits]


def _fit(
    raw: Sequence[tuple[str, dict[str, list[Span]]]], end_s: float
) -> tuple[tuple[Row, ...], float, int]:
    """Merge what falls on one pixel; then leave out every n-th checkpoint until the rows fit."""
    resolution_s = end_s / PIXELS if end_s > 0 else 0.0
    merged = [
        (
            label,
            {
                kind: _merge(items, resolution_s if kind in CHECKPOINTS else 0.0)
                for kind, items in kinds.items()
                if items
            },
        )
        for label, kinds in raw
    ]
    count = sum(len(spans) for _, kinds in merged for spans in kinds.values())
    every = max(1, -(-count // SPANS))
    rows = tuple(
        Row(
            label=label,
            spans={
                kind: _flat(spans[::every] if kind in CHECKPOINTS else spans)
                for kind, spans in kinds.items()
            },
        )
        for label, kinds in merged
    )
    return rows, resolution_s, every


def _merge(spans: Iterable[Span], resolution_s: float) -> list[Span]:
    merged: list[Span] = []
    for start_s, end_s in sorted(spans):
        if merged and start_s - merged[-1][1] <= resolution_s:
            merged[-1] = (merged[-1][0], max(end_s, merged[-1][1]))
        else:
            merged.append((start_s, end_s))
    return merged


def _flat(spans: Iterable[Span]) -> tuple[float, ...]:
    return tuple(round(moment, 3) for span in spans for moment in span)


def _marks(events: Sequence[Event], start_s: float) -> list[Mark]:
    """Everything worth a line in the table, once per moment and text, not once per rank.

    Ranks that end because another one has failed are no failures of their own.
    """
    marks: dict[tuple[str, str], Mark] = {}
    newest_start, has_failed = -1, False
    for event in events:
        described = _describe(event)
        if described is None:
            continue
        kind, text = described
        if isinstance(event, RunStarted):
            if event.restart_count == newest_start:
                continue
            newest_start, has_failed = event.restart_count, False
        if isinstance(event, FailureObserved) and event.what == "trainer":
            follows, has_failed = has_failed, True
            if follows:
                continue
        marks.setdefault((kind, text), Mark(at_s=event.at_s - start_s, kind=kind, text=text))
    return sorted(marks.values(), key=lambda mark: mark.at_s)


def _describe(event: Event) -> tuple[str, str] | None:
    match event:
        case RunStarted():
            return "start", f"term {event.term} started on {event.world_size} ranks"
        case FailureObserved():
            return "failure", (
                f"{event.what} lost: rank {event.failed_rank}, step {event.step}. {event.detail}"
            )
        case Restored():
            return "restore", (
                f"restored {event.generation} from {event.source}, {event.lost_steps} steps lost"
            )
        case LossyRestored():
            return "restore", f"LOSSY restore of {event.generation}: {event.lost}"
        case PlanChanged():
            return "plan", (
                f"plan version {event.plan_version} from step {event.step}: memory every "
                f"{event.memory_interval_steps}, disk every {event.disk_interval_steps} steps. "
                f"{event.reason}"
            )
        case PlanChangeWithheld():
            return "plan", (
                f"not changed at step {event.step}, because the policy only observes: "
                f"{event.reason}"
            )
        case SaveSkipped():
            return "skipped", f"checkpoint due at step {event.step} skipped: {event.reason}"
        case SnapshotDiscarded():
            return "discarded", f"snapshot of step {event.step} discarded: {event.reason}"
        case PersistFailed():
            return "failed", f"step {event.step} did not become durable: {event.reason}"
        case ReplicationLost():
            return "degraded", f"copies on other nodes are missing: {event.reason}"
        case ReplicaFetched(purpose="restore"):
            where = "several nodes" if event.from_node < 0 else f"node {event.from_node}"
            return "fetched", (
                f"rank {event.shard_rank}'s shard of {event.generation} came from {where} to node "
                f"{event.to_node}: {format_bytes(event.bytes)} in {format_duration(event.copy_s)}"
            )
        case TrainerFailed():
            return "failure", f"rank {event.rank} failed at step {event.step}: {event.error}"
        case Degraded():
            return "degraded", f"{event.what} degraded: {event.reason}"
        case RunEnded():
            return "end", f"ended at step {event.step}: {event.reason}"
        case _:
            return None


def _ends(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """The first and the newest marks, when there are too many."""
    if len(marks) <= MARKS:
        return tuple(marks)
    return (*marks[: MARKS // 2], *marks[-MARKS // 2 :])
