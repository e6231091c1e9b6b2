"""The fate of the checkpoints: their number, stalls, and time until safe.

A generation is one checkpoint however many ranks report it.  Its stall is that of the slowest rank,
because the others wait for it in the next collective.  Where training waits for the disk
(`staging.persist: sync`), it is blocked until the checkpoint is durable.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from autockpt.values.plan import Decision
from autockpt.values.telemetry import (
    LOST,
    NO_SLOT,
    WITHDRAWN,
    CheckpointDeleted,
    CheckpointDurable,
    Event,
    FailureObserved,
    GenerationReplicated,
    IterationsTimed,
    MemoryCommitted,
    PersistFailed,
    PlanChanged,
    RemoteCopied,
    Restored,
    RunEnded,
    RunStarted,
    SaveSkipped,
    SnapshotDiscarded,
    SnapshotSealed,
)

REASONS_SHOWN = 5
NOT_BEGUN = (WITHDRAWN, NO_SLOT)
"""Ends of the reason of a save without a copy: its rank tells it as skipped, where it was due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A set of durations in seconds."""

    n: int
    mean_s: float
    p50_s: float
    p95_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Counts of checkpoints by outcome."""

    sealed: int
    memory_committed: int
    disk_committed: int
    skipped: int
    """Due and not started."""
    discarded: int
    """Copied and thrown away because state changed during the copy."""
    failed: int
    """Not durable, though no rank was lost meanwhile; older ones untouched."""
    retired: int
    """Deleted by the retention policy."""
    state_bytes: int
    """Bytes of the newest durable generation, all ranks."""
    stored_bytes: int
    """Size on disk."""
    reasons: dict[str, int]
    """Why checkpoints were skipped, discarded or failed, most frequent first."""
    stall: Spread | None
    """Of checkpoints to disk only, where training waits for it and there are any."""
    boundary_share: float
    """Part of all stall of snapshots spent copying at the boundary; the rest is waiting at the
    staging barrier, 0..1."""
    copy: Spread | None
    """Boundary to last byte in host memory."""
    durable: Spread | None
    """Boundary to durable on disk."""
    write: Spread | None
    """First byte to last fsync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """How much work a failure would cost that leaves this tier as the newest source."""

    tier: str
    step: int
    """Newest recoverable step at the end."""
    age_steps: int
    age_s: float
    """Since that state was current, at the end of the telemetry."""
    worst_s: float
    """The largest age in the run, time down excluded: just before the next checkpoint was safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A new version of the plan, applied by all ranks."""

    at_s: float
    plan_version: int
    step: int
    memory_interval_steps: int
    disk_interval_steps: int
    reason: str


def spread(samples: Iterable[float]) -> Spread | None:
    """Mean, median, p95 (nearest rank) and maximum; None without finite samples."""
    ordered = sorted(sample for sample in samples if math.isfinite(sample))
    if not ordered:
        return None
    return Spread(
        n=len(ordered),
        mean_s=math.fsum(ordered) / len(ordered),
        p50_s=ordered[(len(ordered) - 1) // 2],
        p95_s=ordered[math.ceil(0.95 * len(ordered)) - 1],
        max_s=ordered[-1],
    )


def waits(decision: Decision | None) -> bool:
    """Whether training waits until a checkpoint is durable, under what was decided."""
    return decision is not None and decision.plan.staging.persist == "sync"


def saves(events: Sequence[Event], *, sync: bool = False) -> Saves:
    """The checkpoints in aligned `events`; `sync`: training waited until they were durable."""
    sealed = [e for e in events if isinstance(e, SnapshotSealed)]
    durable = [e for e in events if isinstance(e, CheckpointDurable)]
    stalls = [(e.generation, e.boundary_stall_s + e.fence_stall_s) for e in sealed]
    if sync and durable:
        stalls = [(e.generation, e.latency_s) for e in durable]
    boundary_s = sum(e.boundary_stall_s for e in sealed)
    stalled_s = boundary_s + sum(e.fence_stall_s for e in sealed)
    newest = durable[-1] if durable else None
    return Saves(
        sealed=len({e.generation for e in sealed}),
        memory_committed=len(_generations(events, MemoryCommitted)),
        disk_committed=len({e.generation for e in durable}),
        skipped=_skipped(events),
        discarded=len(_generations(events, SnapshotDiscarded)),
        failed=len({e.generation for e in events if _is_failed(e)}),
        retired=len(_generations(events, CheckpointDeleted)),
        state_bytes=newest.bytes if newest else 0,
        stored_bytes=newest.stored_bytes if newest else 0,
        reasons=_reasons(events),
        stall=spread(_slowest(stalls)),
        boundary_share=boundary_s / stalled_s if stalled_s > 0 else 0.0,
        copy=spread(_slowest((e.generation, e.copy_s) for e in sealed)),
        durable=spread(_slowest((e.generation, e.latency_s) for e in durable)),
        write=spread(_slowest((e.generation, e.write_s) for e in durable)),
    )


def ages(events: Sequence[Event]) -> tuple[Age, ...]:
    """Recoverable-step age of each tier that committed anything."""
    blocks = [e for e in events if isinstance(e, IterationsTimed)]
    if not blocks:
        return ()
    found = (
        _age(tier, events, kind, blocks[-1].step, max(e.at_s for e in blocks))
        for tier, kind in (
            ("memory", MemoryCommitted),
            ("other nodes", GenerationReplicated),
            ("disk", CheckpointDurable),
            ("object store", RemoteCopied),
        )
    )
    return tuple(age for age in found if age is not None)


def changes(events: Sequence[Event], start_s: float) -> tuple[Change, ...]:
    """Every plan version once, at its first report."""
    seen: dict[int, Change] = {}
    for event in events:
        if isinstance(event, PlanChanged) and event.plan_version not in seen:
            seen[event.plan_version] = Change(
                at_s=event.at_s - start_s,
                plan_version=event.plan_version,
                step=event.step,
                memory_interval_steps=event.memory_interval_steps,
                disk_interval_steps=event.disk_interval_steps,
                reason=event.reason,
            )
    return tuple(seen.values())


def _age(
    tier: str,
    events: Sequence[Event],
    kind: type[MemoryCommitted | GenerationReplicated | CheckpointDurable | RemoteCopied],
    step: int,
    end_s: float,
) -> Age | None:
    """Follow the newest moment whose state this tier holds; time down is not work at stake."""
    newest_s: float | None = None
    newest_step, worst_s, seen = 0, 0.0, False
    over_s = math.inf
    for event in events:
        if isinstance(event, RunStarted):
            if newest_s is None or over_s < math.inf:
                newest_s = event.at_s
            over_s = math.inf
        elif isinstance(event, RunEnded) and event.reason == "finished":
            over_s = min(over_s, event.at_s)  # nothing is trained behind it, so nothing ages
        elif isinstance(event, Restored):
            newest_s = event.at_s
        elif isinstance(event, FailureObserved) or _is_end(event):
            worst_s = max(worst_s, event.at_s - newest_s) if newest_s is not None else worst_s
            newest_s = None
        elif isinstance(event, kind):
            at_s = min(event.at_s, over_s)
            worst_s = max(worst_s, at_s - newest_s) if newest_s is not None else worst_s
            newest_s = max(event.at_s - event.latency_s, newest_s or -math.inf)
            newest_step, seen = event.step, True
    if not seen:
        return None
    age_s = 0.0 if newest_s is None else max(0.0, end_s - newest_s)
    return Age(
        tier=tier,
        step=newest_step,
        age_steps=max(0, step - newest_step),
        age_s=age_s,
        worst_s=max(worst_s, age_s),
    )


def _is_end(event: Event) -> bool:
    """The run had to leave: unrecoverable work is lost, as with a failure."""
    return isinstance(event, RunEnded) and event.reason == "signal"


def _generations(events: Sequence[Event], kind: type[Event]) -> set[str]:
    return {getattr(e, "generation", "") for e in events if isinstance(e, kind)}


def _is_failed(event: Event) -> TypeGuard[PersistFailed]:
    """A persist that began has failed, and no rank was lost: then that failure is the cause."""
    return isinstance(event, PersistFailed) and not event.reason.endswith((LOST, *NOT_BEGUN))


def _skipped(events: Sequence[Event]) -> int:
    """All ranks skip together; the rank that reported most saw them all."""
    by_rank = Counter(e.rank for e in events if isinstance(e, SaveSkipped))
    return max(by_rank.values(), default=0)


def _reasons(events: Sequence[Event]) -> dict[str, int]:
    """Reasons by the number of checkpoints they cost."""
    seen = {
        (e.reason, e.step)
        for e in events
        if isinstance(e, SaveSkipped | SnapshotDiscarded | PersistFailed)
        and not (isinstance(e, PersistFailed) and e.reason.endswith(NOT_BEGUN))
    }
    return dict(Counter(reason for reason, _ in sorted(seen)).most_common(REASONS_SHOWN))


def _slowest(samples: Iterable[tuple[str, float]]) -> list[float]:
    """The largest sample of each generation."""
    worst: dict[str, float] = {}
    for generation, sample in samples:
        worst[generation] = max(sample, worst.get(generation, sample))
    return list(worst.values())
