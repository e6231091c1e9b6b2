"""Which commits to delete: a pure function of the catalogue.

Only *counted* generations push others out: verified, healthy, not set aside, and on the lineage.
Whatever has fewer than `keep_last` counted generations above it stays, so the newest durable one,
the one restored from and everything unverified at the top can never go, and a run of suspect
saves cannot expire the last good one.

Source: docs/protocol.md, rule 10.
"""

import contextlib
from collections.abc import Iterable

from autockpt.executors.protocol.messages import CatalogueEntry, EpochParent, Record
from autockpt.executors.protocol.selection import on_lineage
from autockpt.values.errors import ConfigError
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention


def deletions(
    catalogue: Iterable[CatalogueEntry],
    retention: Retention,
    *,
    chain: tuple[EpochParent, ...],
    pinned: frozenset[Generation] = frozenset(),
) -> tuple[Generation, ...]:
    """Generations to delete, oldest first.  Applying it twice deletes nothing more.

    `pinned` are never deleted, nor what they or those that stay are stored as differences to.
    """
    entries = sorted(catalogue, key=lambda entry: entry.generation)
    counted = [entry for entry in entries if counts(entry, chain)]
    kept = _kept_by_distance(counted, retention) | pinned
    kept |= {entry.generation for entry in entries if entry.quarantined}
    needed = max(1, retention.keep_last)
    if len(counted) <= needed:
        return ()
    oldest_of_last = counted[-needed].generation
    staying = kept | {e.generation for e in entries if e.generation >= oldest_of_last}
    staying = with_bases(staying, entries)
    return tuple(entry.generation for entry in entries if entry.generation not in staying)


def bases_of(records: Iterable[Record]) -> frozenset[Generation]:
    """Generations that the shards of a commit are stored as differences to."""
    found: set[Generation] = set()
    for record in records:
        with contextlib.suppress(ConfigError):  # a name that nobody wrote needs nothing
            found.add(Generation.from_name(str(record.get("base", ""))))
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


def counts(entry: CatalogueEntry, chain: tuple[EpochParent, ...]) -> bool:
    """True if this commit may push older ones out."""
    sound = entry.verified and not entry.corrupt and not entry.quarantined
    return sound and entry.health == "good" and on_lineage(entry.generation, chain)


def _kept_by_distance(counted: list[CatalogueEntry], retention: Retention) -> frozenset[Generation]:
    """From the oldest on, one per `keep_every_s` and one per `keep_every_steps`.

    Starting at the oldest makes the choice stable: what was kept once is the anchor next time.
    """
    kept: set[Generation] = set()
    last_s: float | None = None
    last_step: int | None = None
    for entry in counted:
        every_s, every_steps = retention.keep_every_s, retention.keep_every_steps
        if every_s is not None and (last_s is None or entry.created_s - last_s >= every_s):
            last_s = entry.created_s
            kept.add(entry.generation)
        if every_steps is not None and (last_step is None or entry.step - last_step >= every_steps):
            last_step = entry.step
            kept.add(entry.generation)
    return frozenset(kept)
