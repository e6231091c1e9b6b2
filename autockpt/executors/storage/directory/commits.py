"""COMMIT and decisions/: the checkpoints that count, and the lineage of the starts.

Truth is the listing of valid COMMITs, each written last.
"""

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from autockpt.executors.protocol.messages import (
    CatalogueEntry,
    Health,
    Record,
    TermParent,
    holds_weights_only,
)
from autockpt.executors.storage.directory.lease import TERM, Lease
from autockpt.executors.storage.directory.marks import pin_of
from autockpt.executors.storage.directory.records import (
    CommitFile,
    is_there,
    names_in,
    publish,
    read_commit,
    read_small,
    storage_error,
)
from autockpt.executors.storage.lineage import decision_text, read_decision
from autockpt.executors.storage.places.place import Place
from autockpt.executors.storage.places.store import read_patiently
from autockpt.values.errors import (
    AutockptError,
    ConfigError,
    CorruptCheckpointError,
    StorageError,
)
from autockpt.values.generation import Generation
from autockpt.values.record import to_json

_T = TypeVar("_T")


class Commits:
    """Writes and lists checkpoints; a term that is fenced commits nothing."""

    def __init__(self, path: str, place: Place, lease: Lease) -> None:
        self.path = path
        self._place = place
        self._lease = lease
        self.unclear: set[Generation] = set()
        """Generations whose COMMIT a store refused with an error: it may have taken it."""

    def generation_path(self, generation: Generation) -> str:
        """Directory of a generation."""
        return os.path.join(self.path, generation.name)

    def create_generation(self, generation: Generation) -> str:
        """Makes the directory of a generation durable; existing is fine."""
        path = self.generation_path(generation)
        if self._place.is_store:
            return path
        # Past the claims: nothing is made on what is under a mount point.  No look-up of its own.
        past = os.path.join(self.path, "terms", os.pardir, generation.name)
        try:
            os.mkdir(past, 0o755)
            self._place.settle(self.path)
        except FileExistsError:
            pass
        except (FileNotFoundError, NotADirectoryError):
            raise self._lease.gone(generation.term, "so nothing is written there") from None
        except OSError as error:
            raise StorageError(f"{path}: cannot create: {error.strerror}") from error
        return path

    def write_index(self, path: str, text: bytes) -> None:
        """Writes an index file beside its shard and makes both names durable."""
        with storage_error("write", path):
            self._place.write_new(path, text)

    def write_commit(
        self, run_id: str, generation: Generation, *, step: int, world_size: int,
        parent: Generation | None, records: tuple[Record, ...], health: Health,
    ) -> float:  # fmt: skip
        """Writes COMMIT; seconds since 1970.

        Raises GuardError (fenced) when a newer term exists before or after, StorageError else.
        """
        self._lease.require_term(generation.term)
        self._require_bases(records)
        created_s = time.time()
        commit = CommitFile(
            run_id=run_id, generation=generation, step=step, world_size=world_size,
            parent=parent, records=records, health=health, created_s=created_s,
        ).sealed()  # fmt: skip
        path = os.path.join(self.generation_path(generation), "COMMIT")
        text = to_json(commit).encode()
        try:
            with storage_error("commit", path):
                if not publish(path, text, replace=False):
                    raise StorageError(f"{path}: exists already")
        except StorageError:
            if not self._stands(path, text):
                self.unclear.add(generation)
                with contextlib.suppress(StorageError):
                    self._lease.require_term(generation.term)  # a newer one may have deleted it
                raise
        self._lease.require_term(generation.term)
        return created_s

    def _stands(self, path: str, text: bytes) -> bool:
        """Whether a store took a COMMIT though its answer was an error, as far as it says."""
        with contextlib.suppress(AutockptError, OSError):
            return self._place.is_store and read_patiently(path, lambda: read_small(path)) == text
        return False

    def _require_bases(self, records: tuple[Record, ...]) -> None:
        """Raise StorageError if a shard's base, which another process may remove, is gone."""
        for name in {str(record["base"]) for record in records if record.get("base")}:
            commit = os.path.join(self.path, name, "COMMIT")
            with storage_error("read", commit):
                if not _is_whole(commit):
                    raise StorageError(f"{commit}: is gone, and a shard is a difference to it")

    def write_decision(
        self, term: int, attempt: int, generation: Generation | None, reason: str
    ) -> None:
        """Records what an incarnation resumes from.  Raises GuardError (fenced), StorageError."""
        self._lease.require_term(term)
        path = os.path.join(self.path, "decisions", f"t-{term:06d}")
        with storage_error("write", path):
            text = decision_text(term, attempt, generation, reason)
            publish(path, text, replace=True)
            self._lease.remember_decision(text)

    def parents(self) -> tuple[TermParent, ...]:
        """The lineage on disk; damaged records are none.

        Raises StorageError when one cannot be read: without it an abandoned generation may look
        like the newest.
        """
        found = []
        directory = os.path.join(self.path, "decisions")
        for name in sorted(filter(TERM.fullmatch, names_in(directory))):
            path = os.path.join(directory, name)
            with contextlib.suppress(CorruptCheckpointError), storage_error("read", path):
                found.append(read_decision(read_small(path), term=int(name[2:]), where=path))
        return tuple(found)

    def catalogue(self, run_id: str) -> tuple[CatalogueEntry, ...]:
        """Every valid COMMIT of this run, oldest first.

        One that a disk cannot read, twice, is left out, like a shard that cannot be read.
        Raises StorageError when the directory itself cannot be: nothing there would mean from
        scratch.  So it does for a COMMIT in a store that cannot be read for minutes.
        """
        entries = []
        for name in sorted(names_in(self.path)):
            with contextlib.suppress(ConfigError, CorruptCheckpointError, FileNotFoundError):
                generation = Generation.from_name(name)
                read = partial(self._entry, generation, run_id)
                try:
                    entry = read_patiently(self.path, partial(_twice, read))
                except FileNotFoundError:
                    raise
                except OSError as error:
                    if not self._place.is_store:
                        continue
                    raise StorageError(
                        f"{self.generation_path(generation)}: cannot be read now: {error.strerror}"
                    ) from error
                if entry is not None:
                    entries.append(entry)
        return tuple(sorted(entries, key=lambda entry: entry.generation))

    def _entry(self, generation: Generation, run_id: str) -> CatalogueEntry | None:
        """None: of another run.  Raises CorruptCheckpointError or OSError."""
        folder = self.generation_path(generation)
        commit = read_commit(os.path.join(folder, "COMMIT"))
        if (commit.run_id, commit.generation) != (run_id, generation):
            return None
        # One request of a store, and not one a mark.
        seen = frozenset(self._place.names(folder)) if self._place.is_store else None

        def has(mark: str) -> bool:
            return is_there(os.path.join(folder, mark)) if seen is None else mark in seen

        sick = commit.health != "good" or has("SUSPECT")
        health: Health = "suspect" if sick else "good"
        return CatalogueEntry(
            generation=commit.generation,
            step=commit.step,
            world_size=commit.world_size,
            parent=commit.parent,
            records=commit.records,
            layout_digests=tuple(str(r.get("layout_digest", "")) for r in commit.records),
            created_s=commit.created_s,
            verified=has("VERIFIED"),
            corrupt=has("CORRUPT"),
            quarantined=has("QUARANTINE"),
            pinned=pin_of(folder) if seen is None or "PINNED" in seen else "",
            health=health,
            reshardable=not holds_weights_only(commit.records),
        )


def _twice(read: Callable[[], _T]) -> _T:
    """Return the result of `read`, tried twice: a brief storage failure must not cost a generation.

    A generation is abandoned for ever when an older one is resumed.  Raises like `read`.
    """
    try:
        return read()
    except FileNotFoundError:
        raise
    except OSError:
        return read()


def _is_whole(commit: str) -> bool:
    """Whether a COMMIT stands, and its shards hold all state.  Raises OSError."""
    try:
        return not holds_weights_only(read_commit(commit).records)
    except (FileNotFoundError, CorruptCheckpointError):
        return False
