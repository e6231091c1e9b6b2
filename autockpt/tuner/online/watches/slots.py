"""The number of memory slots, by the saves that lack one and the memory that the host has left.

        one more   saves are skipped for want of a slot, and one more fits beside the reserve
        one less   the host has less left than the reserve of the training

A rank keeps two: with one, no failure is served from memory.
"""

from dataclasses import dataclass, replace

from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan
from autockpt.values.telemetry import (
    NO_SLOT,
    Event,
    HostMemoryNoted,
    SaveSkipped,
    SnapshotBegan,
)
from autockpt.values.units import format_bytes

DUES = 8
"""Newest saves that count,"""
STARVED = 3
"""and how many of them must have been skipped for want of a slot."""
MOST = 8
"""Slots that this rule gives at most."""
LEAST = 2
TIGHT_NOTES = 3
"""Looks at the host's memory in a row that must find less than the reserve."""
AMPLE = 2.0
"""Times the room of a slot that must be left before a slot that was given up comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotWatch:
    """Saves that lacked a slot, and the host's memory."""

    dues: tuple[bool, ...] = ()
    """Of the newest saves, whether each was skipped for want of a slot."""
    host: HostMemoryNoted | None = None
    """The newest look at the host; None: there was none."""
    tight: int = 0
    """Looks in a row that found less than the reserve."""
    shrunk: bool = False
    """A slot was given up in this run."""


def noted(watch: SlotWatch, event: Event) -> SlotWatch:
    """The watch after an event of this run."""
    if isinstance(event, SnapshotBegan):
        return replace(watch, dues=(*watch.dues, False)[-DUES:])
    if isinstance(event, SaveSkipped) and event.reason.endswith(NO_SLOT):
        return replace(watch, dues=(*watch.dues, True)[-DUES:])
    if isinstance(event, HostMemoryNoted):
        tight = watch.tight + 1 if event.available_bytes < event.reserve_bytes else 0
        return replace(watch, host=event, tight=tight)
    return watch


def changed(watch: SlotWatch, *, fewer: bool) -> SlotWatch:
    """The watch after a change of the number: earlier saves tell nothing of the new one."""
    return replace(watch, dues=(), tight=0, shrunk=watch.shrunk or fewer)


def more(watch: SlotWatch, plan: CheckpointPlan, goal: Goal) -> str:
    """Why one more slot should be made; "" if it should not."""
    host, skipped = watch.host, sum(watch.dues)
    if host is None or goal.pins.slots is not None or len(watch.dues) < DUES or skipped < STARVED:
        return ""
    if not host.slots or host.slots < plan.slots or plan.slots >= MOST:
        return ""  # none are made yet, or one is still to come
    needed = host.slot_bytes * host.ranks
    limit = goal.limits.host_memory_bytes
    left = host.room_bytes if limit is None else min(host.room_bytes, limit - needed * plan.slots)
    if left < needed * (AMPLE if watch.shrunk else 1.0):
        return ""
    return (
        f"{skipped} of the newest {DUES} saves were skipped for want of a slot, and one of "
        f"{format_bytes(host.slot_bytes)} for each of {host.ranks} rank(s) fits into the "
        f"{format_bytes(left)} that are left: slots {plan.slots} -> {plan.slots + 1}"
    )


def less(watch: SlotWatch, plan: CheckpointPlan, goal: Goal) -> str:
    """Why one slot should be given up; "" if it should not."""
    host, least = watch.host, max(LEAST, (goal.pins.in_flight or 0) + 1)
    if host is None or goal.pins.slots is not None or plan.slots <= least:
        return ""
    if watch.tight < TIGHT_NOTES:
        return ""
    return (
        f"the host has {format_bytes(host.available_bytes)} of memory left, less than the "
        f"{format_bytes(host.reserve_bytes)} that the training may need at any time: slots "
        f"{plan.slots} -> {plan.slots - 1}"
    )
