"""The number of memory slots, by the saves that lack one and the memory that the host has left.

        one more   saves are skipped for want of a slot, and one more fits beside the reserve
A slot is never given up while a job trains: it may hold the newest image that all ranks have.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotWatch:
    """Saves that lacked a slot, and the host's memory."""

    dues: tuple[bool, ...] = ()
    """Of the newest saves, whether each was skipped for want of a slot."""
    host: HostMemoryNoted | None = None
    """The newest look at the host of rank 0; None: there was none."""


def noted(watch: SlotWatch, event: Event) -> SlotWatch:
    """The watch after an event of this run."""
    if isinstance(event, SnapshotBegan):
        return replace(watch, dues=(*watch.dues, False)[-DUES:])
    if isinstance(event, SaveSkipped) and event.reason.endswith(NO_SLOT):
        return replace(watch, dues=(*watch.dues, True)[-DUES:])
    if isinstance(event, HostMemoryNoted):
        return replace(watch, host=event)
    return watch


def changed(watch: SlotWatch) -> SlotWatch:
    """The watch after a change of the number: earlier saves tell nothing of the new one."""
    return replace(watch, dues=())


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
    if left < needed or host.available_bytes - needed < host.reserve_bytes:
        return ""
    return (
        f"{skipped} of the newest {DUES} saves were skipped for want of a slot, and one of "
        f"{format_bytes(host.slot_bytes)} for each of {host.ranks} rank(s) fits into the "
        f"{format_bytes(left)} that are left: slots {plan.slots} -> {plan.slots + 1}"
    )
