"""Retention chooses the commits to delete: a pure function of the catalogue.

Only *counted* generations push others out: verified, healthy, not set aside, and on the lineage.  A
generation stays while fewer than `keep_last` counted generations are above it.  So the newest
durable one, the restored one and unverified ones at the top can never go.  Suspect saves cannot
expire the last good one.  Behind an error that is noticed late one more is kept.  Beside these stay
the best by a metric, one per distance, and each that a person has pinned.  Of the unread ones the
best stay as well.

With `weights_only`, older checkpoints that stay lose their optimizer state.  Then they count no
more, for nothing can be resumed from them.

Source: docs/internals/protocol.md, rules 10 and 23.
"""

import contextlib
import math
from collections.abc import Iterable

from autockpt.executors.protocol.messages import REPLACES, CatalogueEntry, Record, TermParent
from autockpt.executors.protocol.selection import on_lineage
from autockpt.values.errors import ConfigError
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention

CONFIRMED_BY = 3
"""Newest checkpoints that agree on the time: one of them may be of a wrong clock."""
WHOLE = 2
"""Newest counted checkpoints that stay whole with any policy."""
SUCCESSORS = 4
"""Steps between now and `reach_s` ago at which a generation is kept for later."""


def deletions(
    catalogue: Iterable[CatalogueEntry],
    retention: Retention,
    *,
    chain: tuple[TermParent, ...],
    pinned: frozenset[Generation] = frozenset(),
) -> tuple[Generation, ...]:
    """Generations to delete, oldest first.  Applying it twice deletes nothing more.

    `pinned` are never deleted, nor are the bases of generations that stay.
    """
    entries = sorted(catalogue, key=lambda entry: entry.generation)
    counted = [entry for entry in entries if counts(entry, chain)]
    read_back = [entry for entry in entries if entry.verified and is_sound(entry, chain)]
    kept = _kept_by_distance(read_back, retention) | _kept_behind(counted, retention) | pinned
    kept |= best(read_back, retention)
    kept |= best((e for e in entries if not e.verified and is_sound(e, chain)), retention)
    kept |= {entry.generation for entry in entries if entry.quarantined or entry.pinned}
    needed = max(1, retention.keep_last)
    if len(counted) <= needed:
        return ()
    oldest_of_last = counted[-needed].generation
    staying = kept | {e.generation for e in entries if e.generation >= oldest_of_last}
    staying = with_bases(staying, entries)
    return tuple(entry.generation for entry in entries if entry.generation not in staying)


def reductions(
    catalogue: Iterable[CatalogueEntry],
    retention: Retention,
    *,
    chain: tuple[TermParent, ...],
    pinned: frozenset[Generation] = frozenset(),
) -> tuple[Generation, ...]:
    """Generations whose optimizer state goes, oldest first.  Done twice, nothing more goes.

    The newest stay whole, and so do those from before an error that is noticed late, pinned ones,
    and bases.
    """
    if not retention.weights_only:
        return ()
    entries = sorted(catalogue, key=lambda entry: entry.generation)
    counted = [entry for entry in entries if counts(entry, chain)]
    older = {e.generation for e in counted[: -max(WHOLE, retention.keep_last)] if not e.pinned}
    older -= _kept_behind(counted, retention)
    # Of a chain of differences the newest goes first, and then the next.
    older -= pinned.union(*(bases_of(entry.records) for entry in entries))
    return tuple(sorted(older))


def unpinned(
    catalogue: Iterable[CatalogueEntry], doomed: Iterable[Generation]
) -> tuple[Generation, ...]:
    """The part of `doomed` that may go after a look at the marks on disk.

    A person pins a checkpoint while a run decides without that knowledge.
    """
    entries = list(catalogue)
    staying = with_bases((entry.generation for entry in entries if entry.pinned), entries)
    return tuple(generation for generation in doomed if generation not in staying)


def metrics_of(records: Iterable[Record]) -> dict[str, float]:
    """The values of `ckpt.report` that the shards of a commit carry; the lowest rank's count."""
    found: dict[str, float] = {}
    for record in records:
        metrics = record.get("metrics")
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            if isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(str(name), float(value))
    return found


def best(counted: Iterable[CatalogueEntry], retention: Retention) -> frozenset[Generation]:
    """The `keep_best` with the best values of the metric, the newer of two equal ones first."""
    order, _, name = retention.metric.partition(" ")
    sign = -1.0 if order == "max" else 1.0
    valued = [(metrics_of(entry.records).get(name), entry.generation) for entry in counted]
    newest_first = sorted(((v, g) for v, g in valued if v is not None), key=lambda x: x[1])[::-1]
    ranked = sorted(newest_first, key=lambda pair: sign * pair[0])
    return frozenset(generation for _, generation in ranked[: retention.keep_best])


def bases_of(records: Iterable[Record]) -> frozenset[Generation]:
    """Generations that the shards of a commit are stored as differences to.

    They include bases of whole shards that may still come back.
    """
    found: set[Generation] = set()
    listed = [each for record in records for each in (record, record.get(REPLACES, {}))]
    for name in {str(record["base"]) for record in listed if "base" in record}:
        with contextlib.suppress(ConfigError):  # a name that nobody wrote needs nothing
            found.add(Generation.from_name(name))
    return frozenset(found)


def with_bases(
    generations: Iterable[Generation], catalogue: Iterable[CatalogueEntry]
) -> frozenset[Generation]:
    """These and all that reading them needs."""
    bases = {entry.generation: bases_of(entry.records) for entry in catalogue}
    needed: set[Generation] = set()
    waiting = list(generations)
    while waiting:
        generation = waiting.pop()
        if generation not in needed:
            needed.add(generation)
            waiting += bases.get(generation, ())
    return frozenset(needed)


def counts(entry: CatalogueEntry, chain: tuple[TermParent, ...]) -> bool:
    """True if this commit may push older ones out."""
    return entry.verified and is_sound(entry, chain) and not entry.weights_only


def is_sound(entry: CatalogueEntry, chain: tuple[TermParent, ...]) -> bool:
    """Nothing is known against it, and it is on the lineage."""
    sound = not entry.corrupt and not entry.quarantined
    return sound and entry.health == "good" and on_lineage(entry.generation, chain)


def _kept_by_distance(counted: list[CatalogueEntry], retention: Retention) -> frozenset[Generation]:
    """From the oldest on, one per `keep_every_s` and one per `keep_every_steps`.

    Starting at the oldest makes the choice stable: a kept generation is the anchor next time.
    """
    kept: set[Generation] = set()
    last_s: float | None = None
    last_step: int | None = None
    for entry in counted:
        every_s, every_steps = retention.keep_every_s, retention.keep_every_steps
        if every_s is not None and (last_s is None or _apart(entry, last_s, every_s)):
            last_s = entry.created_s
            kept.add(entry.generation)
        if every_steps is not None and (last_step is None or entry.step - last_step >= every_steps):
            last_step = entry.step
            kept.add(entry.generation)
    if retention.ttl_s is None:
        return frozenset(kept)
    ages_s = zip(counted, _ages_s(counted), strict=True)
    old = {entry.generation for entry, age_s in ages_s if age_s > retention.ttl_s}
    return frozenset(kept - old)


def _ages_s(counted: list[CatalogueEntry]) -> list[float]:
    """How much older than the newest each is at least, by clocks of which some may be wrong.

    The newest agree on the time.  A time counts that is not after that, and not before an older
    checkpoint's.  Where it does not count, the checkpoint is as old as the next one whose time
    does.  So a clock that is far ahead or behind for a while makes nothing old.
    """
    now_s = made_s = min((e.created_s for e in counted[-CONFIRMED_BY:]), default=0.0)
    latest_s, in_order = -math.inf, []
    for entry in counted:
        in_order.append(latest_s <= entry.created_s <= now_s)
        latest_s = entry.created_s if in_order[-1] else latest_s
    ages_s = []
    for entry, is_in_order in zip(reversed(counted), reversed(in_order), strict=True):
        made_s = entry.created_s if is_in_order else made_s
        ages_s.append(now_s - made_s)
    return ages_s[::-1]


def _kept_behind(counted: list[CatalogueEntry], retention: Retention) -> frozenset[Generation]:
    """The newest that is at least `reach_s` older than the newest of all, and its successors.

    Successors stand a quarter of `reach_s` apart, so that the next to be old enough is there when
    its time comes.  About five are kept at any checkpoint frequency.  The newest, which tell the
    time, stay as well.
    """
    reach_s = retention.reach_s
    if reach_s is None or not counted:
        return frozenset()
    old = [i for i, age_s in enumerate(_ages_s(counted)) if age_s >= reach_s]
    start = old[-1] if old else 0
    kept, last_s = {counted[start].generation}, counted[start].created_s
    for entry in counted[start + 1 :]:
        if _apart(entry, last_s, reach_s / SUCCESSORS):
            kept.add(entry.generation)
            last_s = entry.created_s
    return frozenset(kept | {entry.generation for entry in counted[-CONFIRMED_BY:]})


def _apart(entry: CatalogueEntry, last_s: float, every_s: float) -> bool:
    """Whether `entry` is so far from the last one, in either direction.

    A clock that was set back would otherwise keep nothing until it caught up.
    """
    return abs(entry.created_s - last_s) >= every_s
