"""Safety that no plan can switch off: refuses to endanger the last good checkpoint."""

from autockpt.executors.protocol.messages import CatalogueEntry
from autockpt.executors.protocol.retention import WHOLE, bases_of, with_bases
from autockpt.values.errors import GuardError
from autockpt.values.generation import Generation


def is_good(entry: CatalogueEntry) -> bool:
    """Counts as a checkpoint to fall back on."""
    sound = entry.health == "good" and not entry.corrupt and not entry.quarantined
    return sound and not entry.weights_only


def check_deletions(
    catalogue: tuple[CatalogueEntry, ...], deletions: tuple[Generation, ...]
) -> None:
    """Raises GuardError unless a good commit newer than every deleted good one stays.

    When some good commit was read back and verified, a verified one must stay as well.
    """
    known = {entry.generation: entry for entry in catalogue}
    doomed = set(deletions)
    staying = [e for e in catalogue if e.generation not in doomed and is_good(e)]
    needed = with_bases((e.generation for e in catalogue if e.generation not in doomed), catalogue)
    for generation in deletions:
        entry = known.get(generation)
        if entry is None:
            raise GuardError(f"{generation}: has no COMMIT of this run; nothing to delete")
        if generation in needed:
            raise GuardError(f"{generation}: others that stay are stored as differences to it")
        if entry.quarantined:
            raise GuardError(f"{generation}: is quarantined by a person and stays")
        if entry.pinned:
            raise GuardError(f"{generation}: is pinned as {entry.pinned!r} and stays")
        if is_good(entry) and not any(kept.generation > generation for kept in staying):
            raise GuardError(f"{generation}: is the newest good checkpoint and stays")
    if any(e.verified for e in catalogue if is_good(e)) and not any(e.verified for e in staying):
        raise GuardError("deletion refused: no verified checkpoint would stay")


def check_reduction(catalogue: tuple[CatalogueEntry, ...], generation: Generation) -> None:
    """Raises GuardError unless a commit may lose its optimizer state.

    Newer verified ones that a restart can use stay, and none is stored as a difference to it.
    """
    entry = next((e for e in catalogue if e.generation == generation), None)
    if entry is None:
        raise GuardError(f"{generation}: has no COMMIT of this run")
    if entry.quarantined or entry.pinned:
        what = f"pinned as {entry.pinned!r}" if entry.pinned else "quarantined by a person"
        raise GuardError(f"{generation}: is {what} and stays whole")
    if any(generation in bases_of(other.records) for other in catalogue):
        raise GuardError(f"{generation}: others are stored as differences to it")
    newer = [e for e in catalogue if e.generation > generation and e.verified and is_good(e)]
    if len(newer) < WHOLE:
        raise GuardError(f"{generation}: {len(newer)} verified ones are newer, expected {WHOLE}")
