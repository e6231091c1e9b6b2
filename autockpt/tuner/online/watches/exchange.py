"""The rate of copies to other nodes, by the speed that the link turns out to have.

The speed is that of the bytes while they move: pauses that the rate makes do not count.  So a lower
rate does not hide that the link is fast again, and a change of the rate causes no other one.

Source: docs/concepts/policy.md, "Online re-tuning".
"""

import math
from dataclasses import dataclass, replace

from autockpt.policies.redundancy.link_speeds import ExchangeAtSpeed
from autockpt.tuner.online.estimates import Window
from autockpt.values.plan import CheckpointPlan
from autockpt.values.redundancy import Redundancy
from autockpt.values.units import format_rate

BAND = 1.6
"""The link must be this many times slower or faster than the rate is meant for.  That is more than
half of the way to the next speed of the table, so no speed lies between two rates."""
UNLIMITED = 1e15
"""Bytes per second that stand for a rate without a limit."""
SIGMAS = 3.0
"""Standard errors that the difference must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeWatch:
    """The speed of the link that the plan's redundancy is meant for."""

    table: tuple[ExchangeAtSpeed, ...] = ()
    """From fast to slow links; empty: nothing is sent, or no link was measured."""
    profiled_s_per_gb: float = 0.0
    """Of the link, as profiled."""
    slower: float = 1.0
    """Times as slow as profiled that the link is, by the rate in force."""


def meant_for(watch: ExchangeWatch, redundancy: Redundancy) -> ExchangeWatch:
    """The watch of a run that begins with this rate; no process tells what it was meant for."""
    if not watch.table:
        return watch

    def distance(at: ExchangeAtSpeed) -> tuple[float, float]:
        rates = [r or UNLIMITED for r in (at.rate_bytes_per_s, redundancy.rate_bytes_per_s)]
        return abs(math.log(rates[0] / rates[1])), abs(math.log(at.slower))

    return replace(watch, slower=min(watch.table, key=distance).slower)


def moved_off(watch: ExchangeWatch, link: Window) -> ExchangeAtSpeed | None:
    """The entry of the link's speed, if that is another one than the rate is meant for.

    `link`: seconds of a gigabyte while it moves.
    """
    found = entry_beyond(watch, link, watch.slower)
    return None if found is None or found.slower == watch.slower else found


def entry_beyond(watch: ExchangeWatch, link: Window, slower: float) -> ExchangeAtSpeed | None:
    """The entry of the link's speed where that is clearly not `slower`."""
    if not watch.table or link.n < 2 or watch.profiled_s_per_gb <= 0:
        return None
    spread = SIGMAS * link.error
    low, high = (max(0.0, link.mean + way * spread) / watch.profiled_s_per_gb for way in (-1, 1))
    if low <= BAND * slower and high * BAND >= slower:
        return None
    return nearest(watch, link.mean / watch.profiled_s_per_gb)


def nearest(watch: ExchangeWatch, slower: float) -> ExchangeAtSpeed:
    """The entry for a link so many times as slow as profiled."""
    return min(watch.table, key=lambda at: abs(math.log(at.slower / max(slower, 1e-9))))


def paced(plan: CheckpointPlan, at: ExchangeAtSpeed) -> CheckpointPlan:
    """The next version of a plan, with the rate for that link."""
    redundancy = replace(plan.redundancy, rate_bytes_per_s=at.rate_bytes_per_s)
    return replace(plan, version=plan.version + 1, redundancy=redundancy)


def sentence(watch: ExchangeWatch, plan: CheckpointPlan, at: ExchangeAtSpeed, link: Window) -> str:
    """Why the rate changes."""
    seen, meant = 1e9 / link.mean, 1e9 / (watch.profiled_s_per_gb * watch.slower)
    before, now = plan.redundancy.rate_bytes_per_s, at.rate_bytes_per_s
    return (
        f"copies to other nodes move at {format_rate(seen)} (mean of {link.n}), and their rate is "
        f"meant for {format_rate(meant)}: {_limit(before)} -> {_limit(now)}"
    )


def moving(link: Window, profiled_s_per_gb: float) -> str:
    """The speed of the link as it was seen, in words."""
    return (
        f"copies to other nodes move at {format_rate(1e9 / link.mean)} (mean of {link.n}), and "
        f"{format_rate(1e9 / profiled_s_per_gb)} was profiled"
    )


def _limit(rate_bytes_per_s: float) -> str:
    return f"at most {format_rate(rate_bytes_per_s)}" if rate_bytes_per_s else "no limit"
