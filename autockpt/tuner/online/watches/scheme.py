"""The scheme of copies to other nodes, by the speed of the link and the failures.

    link moved   each scheme at the speed that was seen, with its own best intervals: the least
                 waste, and of equal ones the least memory, as the profile's plan was chosen
    undone       no exchange came to an end, or exchanges take so long that the scheme before wastes
                 less; it is not tried again over a link of this speed

Source: docs/concepts/policy.md, "Online re-tuning".
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from autockpt.policies.cost_model.costs import PeerCosts
from autockpt.policies.cost_model.waste import WasteParts, gain
from autockpt.policies.redundancy.choose import TIE
from autockpt.policies.redundancy.link_speeds import ExchangeAtSpeed, SchemeBySpeed
from autockpt.tuner.online.estimates import winsorised
from autockpt.values.redundancy import Redundancy, is_placed_alike, placing, said
from autockpt.values.telemetry import HostMemoryNoted
from autockpt.values.units import format_duration, format_fraction

EXCHANGES = 3
"""Exchanges under a new scheme before it is judged, beside the first: that one may be the last of
the scheme before."""
JUDGED = 12
"""Exchanges after which a scheme stays."""

WasteOf = Callable[[PeerCosts], WasteParts | None]
"""Of the best intervals with an exchange; None where the limits leave none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The scheme to change to, and why."""

    redundancy: Redundancy
    waste: float
    """With it, fraction of time,"""
    waste_now: float
    """and with the scheme of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The newest change of the scheme, while it is watched."""

    before: Redundancy
    before_times: float
    """Exchanges under it took so many times as long as expected."""
    sealed: int
    """Snapshots of the run when it changed."""
    sends_s: tuple[float, ...] = ()
    """Of its exchanges, oldest first."""
    slower: float = 1.0
    """Speed of the link for which it changed, as `SchemeWatch.slower`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Barred:
    """A scheme that was given up over a link of this speed."""

    redundancy: Redundancy
    slower: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeWatch:
    """The schemes to choose from, and the newest change."""

    schemes: tuple[SchemeBySpeed, ...] = ()
    """The one of the plan and its alternatives; empty: nothing is sent."""
    slower: float = 1.0
    """Times as slow as profiled that the link is, by the scheme in force; 0: not known."""
    wanted: Wanted | None = None
    """None: the scheme of the plan."""
    trial: Trial | None = None
    barred: tuple[Barred, ...] = ()
    changed_s: float | None = None
    """When this process changed the scheme last, and"""
    changed_sealed: int = 0
    """the snapshots of the run then."""

    def of(self, redundancy: Redundancy) -> SchemeBySpeed | None:
        """The entry of a scheme; None: it is not known here."""
        same = (one for one in self.schemes if is_placed_alike(one.redundancy, redundancy))
        return next(same, None)


def at_speed(one: SchemeBySpeed, slower: float) -> ExchangeAtSpeed | None:
    """The exchange of a scheme over a link of this speed."""
    return next((at for at in one.table if at.slower == slower), None)


def considered(
    watch: SchemeWatch,
    now: Redundancy,
    slower: float,
    waste_of: WasteOf,
    *,
    least_gain: float,
) -> SchemeWatch:
    """The watch with the best scheme over a link of this speed.

    `least_gain`: of the productive time, for a change that frees no memory.
    """
    watch = replace(watch, slower=slower, wanted=None)
    own = watch.of(now)
    if own is None:
        return watch
    rows = [row for one in watch.schemes if (row := _row(watch, one, own, slower, waste_of))]
    present = next((parts for parts, one in rows if one is own), None)
    if present is None:
        return watch
    least = min(parts.total for parts, _ in rows)
    equal = [(parts, one) for parts, one in rows if parts.total <= least * (1.0 + TIE)]
    parts, best = min(equal, key=lambda row: (row[1].held_bytes, row[0].total))
    frees = best.held_bytes < own.held_bytes and parts.total <= present.total * (1.0 + TIE)
    if best is own or not (frees or gain(present, parts) >= least_gain):
        return watch
    wanted = Wanted(redundancy=best.redundancy, waste=parts.total, waste_now=present.total)
    return replace(watch, wanted=wanted)


def _row(
    watch: SchemeWatch, one: SchemeBySpeed, own: SchemeBySpeed, slower: float, waste_of: WasteOf
) -> tuple[WasteParts, SchemeBySpeed] | None:
    barred = Barred(redundancy=placing(one.redundancy), slower=slower) in watch.barred
    at = at_speed(one, slower)
    if at is None or (barred and one is not own):
        return None
    parts = waste_of(at.peers)
    return None if parts is None else (parts, one)


def has_room(
    watch: SchemeWatch, now: Redundancy, then: Redundancy, host: HostMemoryNoted | None
) -> bool:
    """Whether the host has the memory for a change, as far as it is known.

    For one round a node holds both schemes.
    """
    own, other = watch.of(now), watch.of(then)
    if own is None or other is None or host is None:
        return True
    needed = max(other.arriving_bytes, other.held_bytes - own.held_bytes)
    return host.room_bytes >= needed


def changed(
    watch: SchemeWatch,
    before: Redundancy,
    now: Redundancy,
    *,
    slower: float,
    sent_s: float,
    at_s: float,
    sealed: int,
) -> SchemeWatch:
    """The watch after a change; `sent_s`: of the exchanges before it, 0: not known."""
    old = watch.of(before)
    expected = at_speed(old, slower) if old is not None else None
    times = sent_s / expected.peers.send_s if expected is not None and sent_s else 1.0
    undone = watch.trial is not None and is_placed_alike(watch.trial.before, now)
    # Under another scheme the same link may look faster or slower.
    speeds = dict.fromkeys((slower, watch.trial.slower) if watch.trial is not None else (slower,))
    given_up = [Barred(redundancy=placing(before), slower=each) for each in speeds]
    found = replace(
        watch,
        slower=slower,
        wanted=None,
        trial=None
        if undone
        else Trial(before=before, before_times=times, sealed=sealed, slower=slower),
        changed_s=at_s,
        changed_sealed=sealed,
    )
    return replace(found, barred=(*found.barred, *given_up)) if undone else found


def exchanged(watch: SchemeWatch, send_s: float) -> SchemeWatch:
    """The watch after an exchange."""
    if watch.trial is None:
        return watch
    sends_s = (*watch.trial.sends_s, send_s)
    trial = replace(watch.trial, sends_s=sends_s) if len(sends_s) <= JUDGED else None
    return replace(watch, trial=trial)


def regret(
    watch: SchemeWatch, now: Redundancy, waste_of: WasteOf, *, sealed: int, least_gain: float
) -> str:
    """Why to go back; "" if there is no reason.  `sealed`: snapshots since the change."""
    trial, own = watch.trial, watch.of(now)
    if trial is None or own is None:
        return ""
    if not trial.sends_s:
        return f"none of {sealed} checkpoints was complete on other nodes with {said(now)}"
    old = watch.of(trial.before)
    at, then = at_speed(own, watch.slower), at_speed(old, watch.slower) if old else None
    if at is None or then is None or len(trial.sends_s) <= EXCHANGES:
        return ""
    seen_s, error_s = winsorised(trial.sends_s[1:])
    slow = replace(at.peers, send_s=seen_s, send_high_s=max(trial.sends_s[1:]))
    times = trial.before_times
    former = replace(
        then.peers, send_s=then.peers.send_s * times, send_high_s=then.peers.send_high_s * times
    )
    parts, parts_before = waste_of(slow), waste_of(former)
    if parts is None or parts_before is None or seen_s - 2.0 * error_s <= at.peers.send_s:
        return ""
    if gain(parts, parts_before) < least_gain:
        return ""
    return (
        f"an exchange takes {format_duration(seen_s)} where {format_duration(at.peers.send_s)} "
        f"was expected; {said(trial.before)} wastes {format_fraction(parts_before.total)} and not "
        f"{format_fraction(parts.total)}"
    )


def sentence(wanted: Wanted, now: Redundancy, seen: str) -> str:
    """Why the scheme changes; `seen`: of the link."""
    return (
        f"{seen}: {said(now)} -> {said(wanted.redundancy)}; the best intervals then waste "
        f"{format_fraction(wanted.waste)} and not {format_fraction(wanted.waste_now)}"
    )
