"""Deletes checkpoints: COMMIT first, and never one that is pinned or may still appear.

Everything is renamed into `trash/` before it is removed.  `spare/` keeps shard files of retired
generations for their blocks.
"""

import contextlib
import os
import re
import shutil

from autockpt.executors.storage.directory.commits import Commits
from autockpt.executors.storage.directory.marks import pin_of
from autockpt.executors.storage.directory.records import (
    files_of,
    is_ours,
    is_there,
    names_in,
    read_commit,
    storage_error,
)
from autockpt.executors.storage.file_reuse import ReusableFiles
from autockpt.executors.storage.places.choose import place_of
from autockpt.executors.storage.places.place import Place
from autockpt.executors.storage.places.unfinished_uploads import end_uploads_before, end_uploads_of
from autockpt.values.errors import AutockptError, GuardError, StorageError
from autockpt.values.generation import Generation

GOING = "COMMIT.going.tmp"
"""COMMIT of a checkpoint that is being deleted."""
_TOKEN = re.compile(r"[0-9a-f]{8}")
UPLOAD_TRIES = 8
"""Removals in a row that cannot end uploads; then a start leaves them to a rule of the bucket."""


class Removal:
    """Removes checkpoints and what starts left unfinished."""

    def __init__(self, path: str, place: Place, commits: Commits) -> None:
        self.path = path
        self._place = place
        self._commits = commits
        self._dropped: set[Generation] = set()
        """Generations without a COMMIT of which a store may still have shards."""
        self._cut_off: dict[Generation, int] = {}
        """Generations of which a store may have parts of uploads, and attempts to end them."""
        self._refusals = 0
        """Attempts in a row to end uploads that have failed."""
        self._warning = ""
        self.spares = ReusableFiles(path)

    def trash(self, generation: Generation) -> None:
        """Moves an uncommitted generation away; refuses one with a COMMIT.

        Raises GuardError, or StorageError where the storage cannot say whether there is one.
        A store is asked again at the next removal.
        """
        path = self._commits.generation_path(generation)
        commit = os.path.join(path, "COMMIT")
        if self._place.is_store and generation in self._commits.unclear:
            raise GuardError(f"{path}: its COMMIT may still appear, and it is not trash")
        if self._place.is_store:
            self._note_dropped(generation)
        with storage_error("look for", commit):
            if is_there(commit):
                raise GuardError(f"{path}: has a COMMIT and is not trash")
        self._remove(path)
        self._sweep(generation)

    def _sweep(self, generation: Generation) -> None:
        """Removes what is left of it in a store, and of earlier ones that could not be removed.

        A store that was lost for hours has refused many saves.  They begin uploads, which it bills.
        """
        if not self._place.is_store:
            return
        self._note_dropped(generation)
        for dropped in sorted(self._dropped):
            path = self._commits.generation_path(dropped)
            with contextlib.suppress(AutockptError, OSError):
                left = self._place.names(path)
                if "COMMIT" in left:
                    self._dropped.discard(dropped)
                    continue
                self._place.discard(path, filter(is_ours, left), "")
                if dropped != generation and not any(map(is_ours, self._place.names(path))):
                    self._dropped.discard(dropped)  # looked at twice: a rank may have put one late
        self._end_uploads(generation)

    def _note_dropped(self, generation: Generation) -> None:
        self._dropped.add(generation)
        if self._refusals < UPLOAD_TRIES:
            self._cut_off.setdefault(generation, 0)

    def _end_uploads(self, generation: Generation) -> None:
        """Ends uploads of removed generations, those first that were tried least.

        It stops at the first that cannot be ended: each request may take seconds.
        """
        for dropped in sorted(self._cut_off, key=lambda one: (self._cut_off[one], one)):
            if not end_uploads_of(self.path, dropped):
                self._cut_off[dropped] += 1
                self._refusals += 1
                break
            self._refusals = 0
            if dropped != generation:
                del self._cut_off[dropped]  # looked at twice: a rank may have begun one late
        if self._cut_off and self._refusals >= UPLOAD_TRIES:
            self._warning = (
                f"{self.path}: uploads of {len(self._cut_off)} removed checkpoints cannot be ended "
                f"({UPLOAD_TRIES} attempts failed), and the store may bill their parts. Allow the "
                "keys s3:ListBucketMultipartUploads and s3:AbortMultipartUpload, or let a rule of "
                "the bucket delete incomplete uploads. The next start tries again"
            )
            self._cut_off.clear()

    def take_warning(self) -> str:
        """The next action of a person about removals, said once; "": none."""
        warning, self._warning = self._warning, ""
        return warning

    def trash_unfinished(self, term: int) -> None:
        """Trashes what incarnations before `term` left without a COMMIT: now that it is claimed,
        none of it can become durable.

        Generations that a person set aside stay, and so do files that cannot be removed.
        """
        with contextlib.suppress(StorageError):
            for name in names_in(self.path):
                with contextlib.suppress(AutockptError, OSError):  # no generation, or committed
                    generation = Generation.from_name(name)
                    path = self._commits.generation_path(generation)
                    if generation.term >= term or is_there(os.path.join(path, "QUARANTINE")):
                        continue
                    if pin_of(path):  # a deletion was cut off before it saw the pin
                        _put_back(path)
                    else:
                        self.trash(generation)
        end_uploads_before(self.path, term)

    def delete(self, generation: Generation) -> int:
        """Deletes a committed generation, COMMIT first; bytes freed.

        Only the files that its COMMIT lists and our own are removed; foreign ones stay in place.
        Raises GuardError for one that a person has pinned, up to the last moment; StorageError.
        """
        path = self._commits.generation_path(generation)
        commit, going = os.path.join(path, "COMMIT"), os.path.join(path, GOING)
        shards, listed = _listed(commit)
        freed = 0
        with contextlib.suppress(OSError):
            sizes = self._place.sizes(path)
            freed = sum(sizes[name] for name in sizes if name in listed or is_ours(name))
        try:
            # Away first, then the look for a pin: `pin` leaves its mark first, then looks for the
            # COMMIT.  One of the two sees the other.
            self._place.move(commit, going)
            try:
                pinned = pin_of(path)
                if pinned:
                    mark = os.path.join(path, "PINNED")
                    raise GuardError(f"{mark}: {generation} is pinned as {pinned!r} and stays")
            except (AutockptError, OSError):
                _put_back(path)
                raise
            self._place.remove(going)
            self._place.settle(path)
        except FileNotFoundError:
            return 0
        except OSError as error:
            where = error.filename if isinstance(error.filename, str) else commit
            raise StorageError(f"{where}: cannot delete: {error.strerror}") from error
        for rank, name in enumerate(shards):
            self.spares.keep(rank, os.path.join(path, name))
        self._remove(path, listed)
        self._sweep(generation)
        return freed

    def _remove(self, path: str, listed: frozenset[str] = frozenset()) -> None:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [name for name in self._place.names(path) if name in listed or is_ours(name)]
        self._place.discard(path, names, os.path.join(self.path, "trash"))

    def empty_trash(self) -> None:
        """Removes what an earlier process could not finish removing; folders of others stay."""
        if self._place.is_store:
            return
        directory = os.path.join(self.path, "trash")
        names: list[str] = []
        with contextlib.suppress(StorageError):
            names = names_in(directory)
        for name in filter(is_trash, names):
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
        self.spares.clear()


def is_trash(name: str) -> bool:
    """Whether a folder of `trash/` has the name of a checkpoint that we put there."""
    generation, _, token = name.rpartition("-")
    if not _TOKEN.fullmatch(token):
        return False
    with contextlib.suppress(AutockptError):
        Generation.from_name(generation)
        return True
    return False


def _listed(path: str) -> tuple[list[str], frozenset[str]]:
    """(shard files by rank, all files) that a COMMIT lists; none when it cannot be read."""
    with contextlib.suppress(AutockptError, OSError):
        records = read_commit(path).records
        return [_plain(str(record.get("file"))) for record in records], files_of(records)
    return [], frozenset()


def _plain(name: str) -> str:
    """Return a name in the generation's folder, for any name in a COMMIT."""
    return os.path.basename(name) or "none"


def _put_back(folder: str) -> None:
    """The COMMIT that a deletion has moved away."""
    with contextlib.suppress(OSError):
        place = place_of(folder)
        place.move(os.path.join(folder, GOING), os.path.join(folder, "COMMIT"))
        place.settle(folder)
