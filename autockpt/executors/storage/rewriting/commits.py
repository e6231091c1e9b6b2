"""A COMMIT that names other shards of the same state: the step that makes rewritten shards count.

It takes two replacements.  The first COMMIT names the new shards, and in `REPLACES` the whole ones.
The second one is final, and only then the whole ones go.  A pin or a newer start that comes between
finds both.  A newer start takes the whole ones back, because it may resume from them.  A process
that is killed at any instant leaves one of them, whole, and files that the next start removes.

A process may be fenced and still run.  So a COMMIT is replaced only if it is still the one
that was read.  Removals follow a replacement that has excluded the others.  In an object store a
put may arrive late, even after the end of its process: there no text of a COMMIT comes twice.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

from autockpt.executors.protocol.messages import REPLACES, Record, holds_weights_only
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.marks import pin_of
from autockpt.executors.storage.directory.records import (
    CommitFile,
    files_of,
    is_undecided,
    names_in,
    read_commit,
    whole_records,
)
from autockpt.executors.storage.places.choose import place_of
from autockpt.executors.storage.places.place import always
from autockpt.values.errors import AutockptError, GuardError, StorageError
from autockpt.values.generation import Generation
from autockpt.values.record import to_json

KEPT_WHOLE = "kept_whole"
"""Key of the first shard's record: differs between two COMMITs of the same shards in a store."""
_SHARDS = re.compile(r"(shard|idx)-\d{5}-[aw]\d+\.(safetensors|json)")
_REWRITTEN = re.compile(r"(?:shard|idx)-\d{5}-w(\d+)\.(?:safetensors|json)")
_NAMES_PER_TERM = 10**9
_ATTEMPTS = 8
"""Another process may decide the same COMMIT at the same time."""


def new_suffix(term: int) -> str:
    """For the files of one order; no other order has the same, and the term can be read from it."""
    return f"w{term * _NAMES_PER_TERM + secrets.randbelow(_NAMES_PER_TERM)}"


def require_held(directory: CheckpointDirectory, term: int) -> None:
    """Raises GuardError where a newer start has claimed the directory."""
    if not directory.holds(term):
        raise GuardError(f"{directory.path}: term {term} is fenced by a newer incarnation")


def replace_commit(
    directory: CheckpointDirectory, commit: CommitFile, records: tuple[Record, ...], *, term: int
) -> None:
    """Makes new shards count, and removes the old ones; goes on where an earlier call has failed.

    The claim is looked at directly before each new COMMIT appears.

    Raises GuardError (fenced, or pinned meanwhile), StorageError, OSError, CorruptCheckpointError.
    """
    folder = directory.generation_path(commit.generation)
    require_held(directory, term)
    missing = files_of(records) - set(place_of(folder).names(folder))
    if missing:
        raise StorageError(f"{folder}: was changed meanwhile; {sorted(missing)[:1]} is missing")
    undecided = commit
    if not is_undecided(commit):
        _require_unpinned(folder, commit.generation)
        both = [{**new, REPLACES: old} for new, old in zip(records, commit.records, strict=True)]
        undecided = replace(commit, records=tuple(both)).sealed()
        _swap(folder, commit, undecided, is_wanted=lambda: directory.holds(term))
    final = replace(commit, records=records).sealed()

    def is_wanted() -> bool:
        # `pin` leaves its mark first and looks then, so one of the two sees the other.
        require_held(directory, term)
        _require_unpinned(folder, commit.generation)
        return True

    try:
        is_wanted()
        _swap(folder, undecided, final, is_wanted=is_wanted)
    except (AutockptError, OSError):
        with contextlib.suppress(AutockptError, OSError):
            if directory.holds(term):  # else the newer start decides
                _decided(folder)
        raise
    _remove(folder, files_of(undecided.records) - files_of(records))


def rewritten_records(commit: CommitFile) -> tuple[Record, ...]:
    """Of the shards that a COMMIT names first, without the replaced ones."""
    return tuple({k: v for k, v in r.items() if k != REPLACES} for r in commit.records)


def _swap(
    folder: str, old: CommitFile, new: CommitFile, *, is_wanted: Callable[[], bool] = always
) -> None:
    """Raises StorageError where the COMMIT is not `old`, GuardError, OSError."""
    path = os.path.join(folder, "COMMIT")
    texts = to_json(old).encode(), to_json(new).encode()
    if not place_of(folder).replace(path, *texts, is_wanted=is_wanted):
        raise StorageError(f"{folder}: was changed meanwhile")


def _whole(folder: str, commit: CommitFile) -> CommitFile:
    """The commit of the whole shards, with a text in a store that it never had."""
    records = list(whole_records(commit))
    if place_of(folder).is_store:
        records[0] = {**records[0], KEPT_WHOLE: secrets.token_hex(8)}
    return replace(commit, records=tuple(records)).sealed()


def _require_unpinned(folder: str, generation: Generation) -> None:
    pinned = pin_of(folder)
    if pinned:
        raise GuardError(f"{generation}: is pinned as {pinned!r} and stays whole")


def forget_rewritten(
    directory: CheckpointDirectory,
    generation: Generation,
    records: tuple[Record, ...],
    *,
    term: int,
) -> None:
    """Removes new shards that do not count; where that is unknown, none.

    Where `term` is held no more, a newer start decides what counts.
    """
    folder = directory.generation_path(generation)
    with contextlib.suppress(AutockptError, OSError):
        commit = read_commit(os.path.join(folder, "COMMIT"))
        if not is_undecided(commit) or directory.holds(term):
            remove_unnamed(folder, files_of(records))


def _decided(folder: str) -> CommitFile:
    """The present COMMIT; one between two replacements is whole again first, if it can be.

    Raises CorruptCheckpointError, StorageError, OSError.
    """
    path = os.path.join(folder, "COMMIT")
    for _ in range(_ATTEMPTS):
        commit = read_commit(path)
        if not is_undecided(commit):
            break
        names = set(place_of(folder).names(folder))
        whole, new = _whole(folder, commit), rewritten_records(commit)
        if files_of(whole.records) <= names:
            decided = whole
        elif files_of(new) <= names:
            decided = replace(commit, records=new).sealed()
        else:
            break
        with contextlib.suppress(StorageError):
            _swap(folder, commit, decided)
            _remove(folder, files_of(new) - files_of(decided.records))
    return commit


def remove_unnamed(folder: str, names: Iterable[str]) -> None:
    """Removes the shards `names`, without any that the COMMIT lists.

    No replacement by a COMMIT that lists one can come later.  Raises AutockptError, OSError.
    """
    commit = _decided(folder)
    unnamed = set(names) - files_of(commit.records)
    if unnamed and not holds_weights_only(commit.records):
        _swap(folder, commit, _whole(folder, commit))
    _remove(folder, unnamed)


def remove_replaced(directory: CheckpointDirectory, *, term: int) -> None:
    """Removes what killed processes of terms before `term` left while they wrote shards again.

    Newer files may be in work, and stay.
    """
    with contextlib.suppress(AutockptError, OSError):
        for name in names_in(directory.path):
            with contextlib.suppress(AutockptError, OSError):
                Generation.from_name(name)
                folder = os.path.join(directory.path, name)
                if any(_term_of(file) in range(1, term) for file in place_of(folder).names(folder)):
                    _decided(folder)
                    remove_unnamed(folder, replaced_shards(folder, term=term))


def replaced_shards(folder: str, *, term: int | None = None) -> list[str]:
    """Shards in a generation's folder that its COMMIT does not name, if some were written again.

    `term`: of terms before it.  Of a pinned generation none: a person may want them.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = place_of(folder).names(folder)
    if "PINNED" not in names and any(map(_REWRITTEN.fullmatch, names)):
        with contextlib.suppress(AutockptError, OSError):
            named = files_of(read_commit(os.path.join(folder, "COMMIT")).records)
            unnamed = [name for name in names if _SHARDS.fullmatch(name) and name not in named]
            return [name for name in unnamed if term is None or _term_of(name) < term]
    return []


def _term_of(name: str) -> int:
    """In which a shard was written again; 0 for one as it was saved."""
    match = _REWRITTEN.fullmatch(name)
    return int(match[1]) // _NAMES_PER_TERM if match else 0


def _remove(folder: str, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            place_of(folder).remove(os.path.join(folder, name))
