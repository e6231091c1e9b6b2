"""One clock for events of several machines and boots.

`at_s` is comparable within one boot of one machine only.  Each RunStarted carries UTC as well, so
the distance between the two tells which boot an event belongs to.  Events of another boot are moved
onto the clock of the first.  Within one boot nothing is touched: small differences between the
clocks are noise of the wall clock, and the monotonic one is the better witness.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from autockpt.values.telemetry import Event, RunStarted

SAME_BOOT_S = 30.0
"""Offsets closer than this are one boot: a wall clock is seldom off by more, a boot seldom less."""


def align(events: Sequence[Event]) -> tuple[Event, ...]:
    """The events on one clock, sorted by time; `events` of one rank must stand in written order."""
    shifts = _shifts(events)
    moved = [
        replace(event, at_s=event.at_s + shift) if shift else event
        for event, shift in zip(events, shifts, strict=True)
        if math.isfinite(event.at_s)
    ]
    return tuple(sorted(moved, key=lambda event: event.at_s))


def utc_s(wall: str) -> float | None:
    """Seconds since 1970 of an ISO 8601 text, None when it is not one."""
    try:
        moment = datetime.fromisoformat(wall)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _shifts(events: Sequence[Event]) -> list[float]:
    """Return the shift of each event's time.  The keeper's events follow the newest start seen."""
    base: float | None = None
    current: dict[int, float] = {}
    newest = 0.0
    shifts = []
    for event in events:
        if isinstance(event, RunStarted):
            wall = utc_s(event.wall)
            if wall is not None and math.isfinite(event.at_s):
                offset = wall - event.at_s
                base = offset if base is None else base
                newest = offset - base if abs(offset - base) > SAME_BOOT_S else 0.0
                current[event.rank] = newest
        shifts.append(current.get(event.rank, newest))
    return shifts
