"""What `make test-all` plays of every campaign, and how its minutes are divided.

Each campaign plays until its count, in at most its part of the time that is left; what it does not
need is everybody's.  Time that is left at the end goes to counts that were not reached, and when
there is none, to the campaigns that never end.  A run may go on where an earlier one ended.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.campaigns.framework import DISTINCT, Summary

LEAST_S = 5.0
"""A campaign needs about as long before its first case."""


@dataclass(frozen=True, slots=True)
class Full:
    """One campaign."""

    count: int | None
    """Executions; None: as many as fit."""
    minutes: float
    """Of one worker, measured on a core of its own, and a tenth or two to spare: its share."""


FULL: dict[str, Full] = {
    "mutants": Full(DISTINCT, 4.5),
    "simulation": Full(1_000_000, 108),
    "errno": Full(26_000, 8.5),
    "store": Full(DISTINCT, 4),
    "kill": Full(DISTINCT, 1),
    "kill-again": Full(5_000, 5),
    "fence": Full(10_000, 7),
    "power": Full(5_000, 10),
    "strace": Full(DISTINCT, 2.5),
    "keeper-ops": Full(DISTINCT, 11),
    "peers": Full(3_000, 5),
    "oom": Full(None, 2),
    "sigterm": Full(None, 2),
    "exact-ranks": Full(50, 9),
    "corruption": Full(1_000_000, 10.5),
    "fuzz": Full(50_000_000, 31),
    "random-kills": Full(20_000, 79),
}
"""In the order of play: the protocol, which all others build on; random kills, which need their
time to the end, last."""
ENDLESS = ("fuzz", "simulation", "random-kills")

Run = Callable[[str, int | None, float, int], Summary]
"""(campaign, count, seconds, number of the first case)."""


def play_all(
    run: Run, seconds: float, *, before: Iterable[Summary] = (),
    keep: Callable[[list[Summary]], None] = lambda summaries: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Summary]:  # fmt: skip
    """Every campaign, until its count or the end of the time, but one case at least.

    `before`: what an earlier run came to; counts add up and numbers go on.  `keep` hears after each
    campaign what all came to so far, so that a run that is cut is not lost.
    """
    ends = clock() + seconds
    played = {one.name: one for one in before if not one.skipped}

    def play(names: Iterable[str]) -> None:
        waiting = list(names)
        while waiting:
            part = FULL[waiting[0]].minutes / sum(FULL[name].minutes for name in waiting)
            name = waiting.pop(0)
            _go_on(run, name, played, part * (ends - clock()))
            keep(ordered())

    def ordered() -> list[Summary]:
        return [played[name] for name in FULL if name in played]

    play([n for n in FULL if n not in played or played[n].wanted is None or not played[n].reached])
    while ends - clock() > LEAST_S:
        missing = [n for n, one in played.items() if not one.reached and not one.skipped]
        play(missing or [name for name in ENDLESS if name in played])
    return ordered()


def _go_on(run: Run, name: str, played: dict[str, Summary], seconds: float) -> None:
    """Plays a campaign, or more of it."""
    count, before = FULL[name].count, played.get(name)
    if before is None:
        summary = played[name] = run(name, count, seconds, 0)
        summary.wanted = summary.distinct if count == DISTINCT else count
        return
    if before.reached:
        count = None
    elif count is not None and count != DISTINCT:
        count -= before.executions
    before.go_on(run(name, count, seconds, before.following))


def counts_reached(summaries: Iterable[Summary]) -> str:
    """For people: what was asked for and reached, and what not."""
    asked = [one for one in summaries if one.wanted is not None]
    lines = []
    for one in asked:
        verdict = "reached" if one.reached else "not reached"
        lines.append(f"{one.name:<12} {one.executions:>11,} of {one.wanted:>11,} {verdict}")
    reached = sum(one.reached for one in asked)
    return "\n".join(["counts:", *lines, f"{reached} of {len(asked)} counts reached"])
