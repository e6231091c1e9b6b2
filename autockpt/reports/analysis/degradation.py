"""WHICH TIER IS DEGRADED NOW, AND WHY?  What failed since each tier was whole last.

A tier is whole by the keepers' events: a checkpoint is in the memory of all ranks, has its copies,
or is durable.  What failed before that is over.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, TypeGuard

from autockpt.reports.analysis.clock import align, utc_s
from autockpt.reports.analysis.replication import losses
from autockpt.values.status import DegradedTier
from autockpt.values.telemetry import (
    CheckpointDurable,
    Degraded,
    Event,
    MemoryCommitted,
    PersistFailed,
    RemoteCopied,
    RunStarted,
    SaveSkipped,
    SnapshotBegan,
    SnapshotDiscarded,
)

SKIPPED = 3
"""Saves in a row that did not begin; one that finds its slots busy is no trouble."""
_IN_MEMORY = ("memory tier", "snapshot", "keeper")
_ON_DISK = ("persist", "checkpoint", "final checkpoint", "storage")
_BUFFERED = "direct I/O"
_COPIER = "copier"
_REMOTE = ("object store", _COPIER)
"""The values of `Degraded.what` by tier."""
_MEMORY_DOES = "every save that is due is tried again; what was held before, or the disk, serves"
_NODES_DO = "the next round of copies tries again; the disk serves the loss of a node"
_DISK_DOES = "every save that is due is tried again, into new files; older ones on disk stay"
_BUFFERED_DOES = "checkpoints become durable all the same, more slowly"
_REMOTE_DOES = "the newest checkpoint is tried again; the disk has it"
_COPIER_DOES = "no more copies are made until the job is started again; the disk has all"

_Trouble = tuple[float, str]
"""(when, why)."""
_Tier = Literal["memory", "other nodes", "disk", "object store"]


def degraded_tiers(events: Sequence[Event]) -> tuple[DegradedTier, ...]:
    """Return the tiers that are degraded at the end of a whole run's `events`, as they serve."""
    events = align(events)
    term_s = _term_s(events)
    found: tuple[tuple[_Tier, list[_Trouble], str], ...] = (
        ("memory", _in_memory(events), _MEMORY_DOES),
        ("other nodes", [(e.at_s, e.reason) for e in losses(events)], _NODES_DO),
        ("disk", _on_disk(events), _DISK_DOES),
        ("disk", _buffered(events), _BUFFERED_DOES),
        ("object store", *_remote(events)),
    )
    return tuple(
        DegradedTier(
            tier=tier,
            since=_utc(term_s, troubles[0][0]),
            because=troubles[-1][1],
            doing=doing,
        )
        for tier, troubles, doing in found
        if troubles
    )


def lacking(events: Sequence[Event]) -> str:
    """Return the sentence about values that the newest snapshots lack; "": they lack none."""
    found: dict[int, str] = {}
    for event in events:
        if isinstance(event, SnapshotBegan):  # its values are reported behind it
            found.pop(event.rank, None)
        elif _is_about(event, ("left out",)):
            found[event.rank] = event.reason
    return next(iter(found.values()), "")


def failing_disk(events: Sequence[Event]) -> DegradedTier | None:
    """The disk, where its errors are newer than the newest checkpoint on it; None: they are not.

    A generation that was dropped for another reason says nothing of the disk.
    """
    events = align(events)
    troubles: list[_Trouble] = []
    for event in events:
        if isinstance(event, CheckpointDurable):
            troubles = []
        elif _is_about(event, _ON_DISK):
            troubles.append((event.at_s, event.reason))
    if not troubles:
        return None
    since = _utc(_term_s(events), troubles[0][0])
    return DegradedTier(tier="disk", since=since, because=troubles[-1][1], doing=_DISK_DOES)


def _in_memory(events: Sequence[Event]) -> list[_Trouble]:
    troubles: list[_Trouble] = []
    skipped: dict[int, _Trouble] = {}
    for event in events:
        if isinstance(event, MemoryCommitted):
            troubles, skipped = [], {}
        elif isinstance(event, SnapshotDiscarded) or _is_about(event, _IN_MEMORY):
            troubles.append((event.at_s, event.reason))
        elif isinstance(event, SaveSkipped):
            skipped.setdefault(event.step, (event.at_s, event.reason))
    if len(skipped) >= SKIPPED:
        troubles += skipped.values()
    return sorted(troubles)


def _on_disk(events: Sequence[Event]) -> list[_Trouble]:
    """Return the troubles of saves to disk, except saves that a newer one has overtaken."""
    troubles: list[_Trouble] = []
    began: dict[str, float] = {}
    wanted: set[str] = set()
    durable_s = float("-inf")
    for event in events:
        if isinstance(event, SnapshotBegan):
            began.setdefault(event.generation, event.at_s)
            if "disk" in event.tiers:
                wanted.add(event.generation)
        elif isinstance(event, CheckpointDurable):
            durable_s = max(durable_s, began.get(event.generation, event.at_s - event.latency_s))
            troubles = []
        elif isinstance(event, PersistFailed):
            if event.generation in wanted and began[event.generation] > durable_s:
                troubles.append((event.at_s, event.reason))
        elif _is_about(event, _ON_DISK):
            troubles.append((event.at_s, event.reason))
    return troubles


def _buffered(events: Sequence[Event]) -> list[_Trouble]:
    return [(e.at_s, e.reason) for e in events if _is_about(e, (_BUFFERED,))]


def _remote(events: Sequence[Event]) -> tuple[list[_Trouble], str]:
    """Return the troubles, and the action meanwhile: the process that copies may be given up."""
    troubles: list[_Trouble] = []
    does = _REMOTE_DOES
    for event in events:
        if isinstance(event, RemoteCopied):
            troubles, does = [], _REMOTE_DOES
        elif _is_about(event, _REMOTE):
            troubles.append((event.at_s, event.reason))
            does = _COPIER_DOES if event.what == _COPIER else _REMOTE_DOES
    return troubles, does


def _is_about(event: Event, whats: Sequence[str]) -> TypeGuard[Degraded]:
    return isinstance(event, Degraded) and event.what in whats


def _term_s(events: Sequence[Event]) -> float | None:
    """Return the origin of aligned times, in seconds since 1970."""
    for event in events:
        if isinstance(event, RunStarted) and (wall := utc_s(event.wall)) is not None:
            return wall - event.at_s
    return None


def _utc(term_s: float | None, at_s: float) -> str:
    if term_s is None:
        return ""
    moment = datetime.fromtimestamp(term_s + at_s, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
