"""A COMMIT that names other shards of the same state: the step that makes rewritten shards count.

The files of both COMMITs stand until the new one is durable.  A process that is killed at any
instant leaves one of them, whole, and files that the next start removes.
"""

import contextlib
import os
import re
import secrets
from dataclasses import replace

from autockpt.executors.protocol.messages import Record
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.marks import pin_of
from autockpt.executors.storage.directory.records import (
    CommitFile,
    files_of,
    publish,
    read_commit,
    read_small,
)
from autockpt.values.errors import AutockptError, ConfigError, GuardError, StorageError
from autockpt.values.generation import Generation
from autockpt.values.record import to_json

_SHARDS = re.compile(r"(shard|idx)-\d{5}-[aw]\d+\.(safetensors|json)")
_REWRITTEN = re.compile(r"(?:shard|idx)-\d{5}-w(\d+)\.(?:safetensors|json)")
_NAMES_PER_TERM = 10**9


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
    """Makes new shards count, and removes the old ones.

    The claim is looked at directly before the new COMMIT appears, and again behind it.

    Raises GuardError (fenced, or pinned meanwhile), StorageError, OSError, CorruptCheckpointError.
    """
    folder = directory.generation_path(commit.generation)
    path = os.path.join(folder, "COMMIT")
    require_held(directory, term)
    missing = files_of(records) - set(os.listdir(folder))
    if missing or read_small(path) != to_json(commit).encode():
        raise StorageError(f"{folder}: was changed meanwhile; {sorted(missing)[:1]} is missing")
    _require_unpinned(folder, commit.generation)
    text = to_json(replace(commit, records=records).sealed()).encode()
    publish(path, text, replace=True, is_wanted=lambda: directory.holds(term))
    try:
        require_held(directory, term)
        # `pin` leaves its mark first and looks then, so one of the two sees the other.
        _require_unpinned(folder, commit.generation)
    except BaseException:
        _put_back(folder, text, commit)
        raise
    _remove(folder, files_of(commit.records) - files_of(records))


def _put_back(folder: str, text: bytes, commit: CommitFile) -> None:
    """The old COMMIT in place of `text`, if what it names is still there."""
    path = os.path.join(folder, "COMMIT")
    with contextlib.suppress(AutockptError, OSError):
        if read_small(path) == text and files_of(commit.records) <= set(os.listdir(folder)):
            publish(path, to_json(commit).encode(), replace=True)


def _require_unpinned(folder: str, generation: Generation) -> None:
    pinned = pin_of(folder)
    if pinned:
        raise GuardError(f"{generation}: is pinned as {pinned!r} and stays whole")


def forget_rewritten(folder: str, records: tuple[Record, ...]) -> None:
    """Removes new shards that the present COMMIT does not name; where it is unknown, none."""
    with contextlib.suppress(AutockptError, OSError):
        named = files_of(read_commit(os.path.join(folder, "COMMIT")).records)
        _remove(folder, files_of(records) - named)


def remove_replaced(directory: CheckpointDirectory, *, term: int) -> None:
    """Removes what killed processes of terms before `term` left while they wrote shards again.

    Newer files may be in work, and stay.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(directory.path):
            with contextlib.suppress(ConfigError):
                Generation.from_name(name)
                folder = os.path.join(directory.path, name)
                _remove(folder, replaced_shards(folder, term=term))


def replaced_shards(folder: str, *, term: int | None = None) -> list[str]:
    """Shards in a generation's folder that its COMMIT does not name, if some were written again.

    `term`: of terms before it.  Of a pinned generation none: a keeper killed behind a new COMMIT
    may not have seen the pin.  Of a directory; in an object store nothing is written again.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
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


def _remove(folder: str, names: "list[str] | frozenset[str]") -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
