"""WOULD A LOST NODE COST MORE THAN A FEW STEPS?  Copies on other nodes, as the run made them.

A generation is protected when every shard has its copies on other nodes.  A checkpoint is degraded
if it is behind by more than a round of copies, or lost copies and did not get them back.  The
keepers give the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.reports.analysis.saves import Spread, spread
from autockpt.values.redundancy import Redundancy, said
from autockpt.values.telemetry import (
    Event,
    GenerationReplicated,
    MemoryCommitted,
    ReplicaFetched,
    ReplicaSent,
    ReplicationLost,
    RunStarted,
)
from autockpt.values.units import format_bytes, format_duration, format_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed:
    """Copies that were sent while the training's own traffic was silent."""

    bytes: int
    share: float
    """Of these, in windows."""
    reason: str
    """Why the newest did not, or not all; "" if they did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """Redundancy between nodes: wanted and had."""

    scheme: str
    """In a few words, as "2 copies, group"."""
    copies_wanted: int
    """Copies or parities on other nodes that a protected generation has, all ranks together."""
    copies_held: int
    """Of the newest generation that has any, verified."""
    protected: int
    """Generations that reached it."""
    newest_step: int | None
    """Of the newest protected generation; None: there never was one."""
    newest_generation: str
    age_s: float | None
    """Since that state was current, at the end of the telemetry; None: not known."""
    behind: int
    """Generations in memory that are newer than that one."""
    degraded: str
    """Why copies are missing at the end; "": they are not."""
    latency: Spread | None
    """From the snapshot's beginning until it was protected."""
    copy: Spread | None
    """One shard from node to node, to protect."""
    copied_bytes: int
    """Between nodes, to protect."""
    emulated: int
    """Shards of these that went through devices that are emulated: times are figures of gates."""
    windowed: Windowed | None
    """How much left in the windows of the network; None where none were waited for."""
    fetched_bytes: int
    """Between nodes, to restore."""
    fetch: Spread | None
    """One shard from node to node, to restore."""


def protection(events: Sequence[Event], redundancy: Redundancy) -> Protection | None:
    """Return the protection in aligned `events`; None where no copies were wanted and none made."""
    protected = [e for e in events if isinstance(e, GenerationReplicated)]
    copied = [e for e in events if isinstance(e, ReplicaFetched)]
    if redundancy.scheme == "none" and not protected and not copied:
        return None
    kept = [e for e in copied if e.purpose == "protect"]
    fetched = [e for e in copied if e.purpose == "restore"]
    newest = protected[-1] if protected else None
    # A keeper that was not there when the snapshot began knows neither its step nor its age.
    timed = [e for e in protected if e.step >= 0]
    named: list[ReplicaFetched | GenerationReplicated] = [*copied, *timed]
    steps = {e.generation: e.step for e in named}
    lost = losses(events)
    return Protection(
        scheme=said(redundancy),
        copies_wanted=_wanted(events, redundancy),
        copies_held=_held(kept, newest),
        protected=len({e.generation for e in protected}),
        newest_step=steps.get(newest.generation, newest.step) if newest else None,
        newest_generation=newest.generation if newest else "",
        age_s=_age_s(events, timed, newest),
        behind=_behind(events, newest),
        degraded=lost[-1].reason if lost else "",
        latency=spread(_last(timed).values()),
        copy=spread(e.copy_s for e in kept),
        copied_bytes=sum(e.bytes for e in kept),
        emulated=sum(e.path == "emulated device" for e in kept),
        windowed=_windowed([e for e in events if isinstance(e, ReplicaSent)]),
        fetched_bytes=sum(e.bytes for e in fetched),
        fetch=spread(e.copy_s for e in fetched),
    )


def facts(copies: Protection) -> tuple[tuple[str, str], ...]:
    """Its figures for people: name and value."""
    newest = "never"
    if copies.newest_step is not None:
        behind = f", {copies.behind} newer in memory only" if copies.behind else ""
        age = "" if copies.age_s is None else f", {format_duration(copies.age_s)} old"
        newest = f"{copies.newest_generation}{age}{behind}"
    rows = [
        ("scheme", copies.scheme),
        ("newest protected", newest),
        ("copies or parities", f"{copies.copies_held} held of {copies.copies_wanted} wanted"),
        ("state", f"degraded: {copies.degraded}" if copies.degraded else "whole"),
    ]
    if copies.latency is not None:
        rows.append(("snapshot to protected", f"{format_duration(copies.latency.p50_s)} median, "
                     f"{format_duration(copies.latency.p95_s)} p95"))  # fmt: skip
    moved = _moved(copies.copied_bytes, copies.copy)
    if copies.emulated:
        moved += f"; {copies.emulated} through emulated devices, at the rate of a setting"
    rows.append(("copied", moved))
    if copies.windowed is not None:
        rows.append(("left in windows", _windowed_words(copies.windowed)))
    if copies.fetch is not None:
        rows.append(("fetched to restore", _moved(copies.fetched_bytes, copies.fetch)))
    return tuple(rows)


def _windowed_words(sent: Windowed) -> str:
    """The share, and why it is not all."""
    why = f"; {sent.reason}" if sent.reason else ""
    return f"{format_fraction(sent.share)} of {format_bytes(sent.bytes)}{why}"


def _windowed(sent: Sequence[ReplicaSent]) -> Windowed | None:
    nbytes = sum(e.bytes for e in sent)
    if not nbytes:
        return None
    share = sum(e.window_bytes for e in sent) / nbytes
    return Windowed(bytes=nbytes, share=share, reason=sent[-1].reason)


def _moved(nbytes: int, each: Spread | None) -> str:
    took = f", {format_duration(each.p50_s)} a shard" if each is not None else ""
    return f"{format_bytes(nbytes)} between nodes{took}"


def _wanted(events: Sequence[Event], redundancy: Redundancy) -> int:
    """Whole copies of every shard, or one parity a rank, for any number of losses."""
    started = next((e for e in reversed(events) if isinstance(e, RunStarted)), None)
    each = 1 if redundancy.parity else redundancy.copies - 1
    return each * (started.world_size if started else 0)


def _held(kept: Sequence[ReplicaFetched], newest: GenerationReplicated | None) -> int:
    """Nodes and shards are counted once, however often a lost answer made them be fetched."""
    generation = newest.generation if newest else (kept[-1].generation if kept else "")
    return len({(e.shard_rank, e.to_node) for e in kept if e.generation == generation})


def _age_s(
    events: Sequence[Event],
    timed: Sequence[GenerationReplicated],
    newest: GenerationReplicated | None,
) -> float | None:
    """Age of the newest replicated state.

    It is not known after a restore, because a restored state is older than its new copies.
    """
    if newest is None:
        return None
    began = [e.at_s - e.latency_s for e in timed if e.generation == newest.generation]
    end_s = max((e.at_s for e in events if e.rank >= 0), default=newest.at_s)
    return max(0.0, end_s - min(began)) if began else None


def _behind(events: Sequence[Event], newest: GenerationReplicated | None) -> int:
    """Generations after the newest protected one that all ranks hold."""
    seen: dict[str, None] = {}
    for event in events:
        if isinstance(event, MemoryCommitted):
            seen[event.generation] = None
    order = list(seen)
    if newest is None or newest.generation not in seen:
        return len(order)
    return len(order) - 1 - order.index(newest.generation)


def losses(events: Sequence[Event]) -> list[ReplicationLost]:
    """Of copies, since all were there last."""
    found: list[ReplicationLost] = []
    for event in events:
        if isinstance(event, GenerationReplicated):
            found = []
        elif isinstance(event, ReplicationLost):
            found.append(event)
    return found


def _last(protected: Sequence[GenerationReplicated]) -> dict[str, float]:
    """Every node says it; the slowest counts."""
    latest: dict[str, float] = {}
    for event in protected:
        latest[event.generation] = max(event.latency_s, latest.get(event.generation, 0.0))
    return latest
