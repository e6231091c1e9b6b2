"""Another scheme of copies is weighed, proposed and undone, by the memory of the controller.

Schemes are weighed once when the link has changed, and not at every question: that takes a
millisecond.  For one round both schemes cost memory and network, so changes are rare.
"""

from dataclasses import dataclass, replace

from autockpt.tuner.online import rollback_check
from autockpt.tuner.online.controller_state import Memory
from autockpt.tuner.online.observed import KNOWN
from autockpt.tuner.online.outlook import Outlook
from autockpt.tuner.online.settings import ControllerSettings
from autockpt.tuner.online.watches import exchange, scheme
from autockpt.values.redundancy import Redundancy, said

LINK_SLOWER = "link_times_slower"
"""Number of a proposal that changes rate or scheme of copies: the speed that it is meant for."""
FELL = 3
"""Exchanges that show how far the time of a gigabyte has fallen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeChange:
    """Another scheme, with its rate."""

    redundancy: Redundancy
    why: str
    numbers: dict[str, float]


def link_is_clear(memory: Memory, settings: ControllerSettings) -> bool:
    """The speed of the link was seen often enough, and its newest samples agree."""
    link = memory.seen.link
    return link.n >= (FELL if link.fell else settings.jump_checkpoints) and not link.doubtful


def note_exchange(memory: Memory, outlook: Outlook, settings: ControllerSettings) -> None:
    """Weigh the schemes where exchanges show another speed of the link."""
    if not link_is_clear(memory, settings):
        return
    slower = memory.scheme.slower
    at = exchange.entry_beyond(memory.exchange, memory.seen.link, slower)
    if at is not None and at.slower != slower:
        _weigh(memory, outlook, settings, at.slower)


def _weigh(memory: Memory, outlook: Outlook, settings: ControllerSettings, slower: float) -> None:
    memory.scheme = scheme.considered(
        memory.scheme, memory.plan.redundancy, slower, outlook.waste_with,
        least_gain=settings.gain_floor,
    )  # fmt: skip


def at_start(memory: Memory, outlook: Outlook, settings: ControllerSettings) -> SchemeChange | None:
    """Another scheme for link, failures and costs as they were seen; nothing dwells."""
    watch, slower = memory.scheme, memory.scheme.slower or memory.exchange.slower
    at = exchange.entry_beyond(memory.exchange, memory.seen.link, watch.slower)
    if at is not None and memory.seen.link.n >= KNOWN:
        slower = at.slower
    _weigh(memory, outlook, settings, slower)
    watch, now = memory.scheme, memory.plan.redundancy
    wanted = watch.wanted
    if wanted is None or not scheme.has_room(watch, now, wanted.redundancy, memory.slots.host):
        return None
    return _to_wanted(memory)


def due(
    memory: Memory, outlook: Outlook, settings: ControllerSettings, *, now_s: float, dwell_s: float
) -> SchemeChange | None:
    """Another scheme now, and back where it turned out worse."""
    watch, now = memory.scheme, memory.plan.redundancy
    since = memory.seen.sealed - watch.changed_sealed
    if watch.trial is not None and since >= settings.watch_checkpoints:
        why = scheme.regret(
            watch, now, outlook.waste_with, sealed=since, least_gain=settings.gain_floor
        ) or _slower(memory, outlook, settings)
        before = watch.trial.before
        if why and scheme.has_room(watch, now, before, memory.slots.host):
            return _change(memory, before, f"{why}: {said(now)} -> {said(before)}")
    if watch.wanted is None:
        return None
    if watch.changed_s is not None:
        long_enough = now_s - watch.changed_s >= dwell_s
        if not long_enough or since < settings.dwell_checkpoints:
            return None
    if not scheme.has_room(watch, now, watch.wanted.redundancy, memory.slots.host):
        return None
    return _to_wanted(memory)


def _slower(memory: Memory, outlook: Outlook, settings: ControllerSettings) -> str:
    """Iterations became longer with the scheme, and nothing else was changed since."""
    change, trial = memory.change, memory.scheme.trial
    if change is None or trial is None or change.sealed != trial.sealed:
        return ""
    return rollback_check.slower(change, outlook, settings)


def _to_wanted(memory: Memory) -> SchemeChange | None:
    wanted, link = memory.scheme.wanted, memory.seen.link
    if wanted is None:
        return None
    seen = "for the failures on record"
    if link.n:
        seen = exchange.moving(link, memory.exchange.profiled_s_per_gb)
    why = scheme.sentence(wanted, memory.plan.redundancy, seen)
    found = _change(memory, wanted.redundancy, why)
    numbers = {"waste_then": wanted.waste, "waste_before": wanted.waste_now}
    return replace(found, numbers={**found.numbers, **numbers})


def _change(memory: Memory, then: Redundancy, why: str) -> SchemeChange:
    watch = memory.scheme
    found = watch.of(then)
    at = scheme.at_speed(found, watch.slower) if found is not None else None
    rate = at.rate_bytes_per_s if at is not None else then.rate_bytes_per_s
    numbers = {LINK_SLOWER: watch.slower, "rate_bytes_per_s": rate}
    if memory.seen.link.n:
        numbers["link_s_per_gb"] = memory.seen.link.mean
    then = replace(then, rate_bytes_per_s=rate, floor=memory.plan.redundancy.floor)
    return SchemeChange(redundancy=then, why=why, numbers=numbers)
