"""A COMMIT that names other shards of the same state: the step that makes rewritten shards count.

The files of both COMMITs stand until the new one is durable.  A process that is killed at any
instant leaves one of them, whole, and files that the next start removes.
"""

import contextlib
import os
import re
from dataclasses import replace

from autockpt.executors.protocol.messages import Record
from autockpt.executors.storage.directory import (
    CheckpointDirectory,
    CommitFile,
    files_of,
    pin_of,
    publish,
    read_commit,
    read_small,
)
from autockpt.values.errors import AutockptError, ConfigError, GuardError, StorageError
from autockpt.values.generation import Generation
from autockpt.values.record import to_json

_SHARDS = re.compile(r"(shard|idx)-\d{5}-[aw]\d+\.(safetensors|json)")
_REWRITTEN = re.compile(r"(shard|idx)-\d{5}-w\d+\.(safetensors|json)")


def replace_commit(
    directory: CheckpointDirectory, commit: CommitFile, records: tuple[Record, ...], *, term: int
) -> None:
    """Makes new shards count, and removes the old ones.

    Raises GuardError (fenced, or pinned meanwhile), StorageError, OSError, CorruptCheckpointError.
    """
    folder = directory.generation_path(commit.generation)
    path = os.path.join(folder, "COMMIT")
    if not directory.holds(term):
        raise GuardError(f"{directory.path}: term {term} is fenced by a newer incarnation")
    missing = files_of(records) - set(os.listdir(folder))
    if missing or read_small(path) != to_json(commit).encode():
        raise StorageError(f"{folder}: was changed meanwhile; {sorted(missing)[:1]} is missing")
    _require_unpinned(folder, commit.generation)
    publish(path, to_json(replace(commit, records=records).sealed()).encode(), replace=True)
    try:
        # `pin` leaves its mark first and looks then, so one of the two sees the other.
        _require_unpinned(folder, commit.generation)
    except BaseException:
        publish(path, to_json(commit).encode(), replace=True)
        raise
    _remove(folder, replaced_shards(folder))


def _require_unpinned(folder: str, generation: Generation) -> None:
    pinned = pin_of(folder)
    if pinned:
        raise GuardError(f"{generation}: is pinned as {pinned!r} and stays whole")


def forget_rewritten(
    directory: CheckpointDirectory, commit: CommitFile, records: tuple[Record, ...]
) -> None:
    """Removes new shards whose COMMIT was not replaced; where that is not known all files stay."""
    folder = directory.generation_path(commit.generation)
    with contextlib.suppress(AutockptError, OSError):
        if read_commit(os.path.join(folder, "COMMIT")) == commit:
            _remove(folder, files_of(records) - files_of(commit.records))


def remove_replaced(directory: CheckpointDirectory) -> None:
    """Removes what processes left that were killed while they wrote shards again."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory.path):
            with contextlib.suppress(ConfigError):
                Generation.from_name(name)
                folder = os.path.join(directory.path, name)
                _remove(folder, replaced_shards(folder))


def replaced_shards(folder: str) -> list[str]:
    """Shards in a generation's folder that its COMMIT does not name, if some were written again.

    Of a directory; in an object store nothing is written again.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    if any(map(_REWRITTEN.fullmatch, names)):
        with contextlib.suppress(AutockptError, OSError):
            named = files_of(read_commit(os.path.join(folder, "COMMIT")).records)
            return [name for name in names if _SHARDS.fullmatch(name) and name not in named]
    return []


def _remove(folder: str, names: "list[str] | frozenset[str]") -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
