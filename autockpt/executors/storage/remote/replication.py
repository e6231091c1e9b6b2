"""Copies of good generations in an object store, by the rules of the checkpoint directory.

* `RUN`: the run of the copies.
* `terms/t-000007`: the directory's claims: the fence.
* `decisions/t-000007`: the lineage.
* `ckpt-t0007-step-00000042/shard-..., COMMIT`: COMMIT is put last and deleted first.

There is no rename and no lock, so unique objects (RUN, a claim, a COMMIT) are put only if nothing
is there yet.  Of two directories that continue the same run, one is thus fenced.  The directory
stays the truth of a live run; the copies here serve where it is lost.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from autockpt import new_files
from autockpt.executors.protocol.messages import CatalogueEntry, TermParent, holds_weights_only
from autockpt.executors.protocol.retention import bases_of, deletions, unpinned, with_bases
from autockpt.executors.protocol.selection import newest_chain, on_lineage, parents_of
from autockpt.executors.storage.catalogue import verify_generation
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import (
    CommitFile,
    RunFile,
    is_ours,
    parse_commit,
    publish,
    read_commit,
    read_small,
)
from autockpt.executors.storage.guard import check_deletions, is_good
from autockpt.executors.storage.lineage import read_decision
from autockpt.executors.storage.maintenance import set_aside
from autockpt.executors.storage.places.object_store import Objects
from autockpt.executors.throttle.rate_limit import Throttle, Unlimited
from autockpt.values.errors import (
    ConfigError,
    CorruptCheckpointError,
    GuardError,
    NoCheckpointError,
    StorageError,
)
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention
from autockpt.values.record import from_json

_TERM = re.compile(r"t-(\d{6})")
_NOTHING: Callable[[int], None] = lambda nbytes: None  # noqa: E731


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A generation that came to the store, or from it."""

    generation: Generation
    step: int
    created_s: float
    """When it was committed, seconds since 1970."""
    bytes: int
    """Bytes moved, without objects that were there already."""


class RemoteCopies:
    """The copies of one run.  Used from one thread at a time."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.url = objects.url

    # ------------------------------------------------------------------ copying there

    def push(
        self, directory: CheckpointDirectory, generation: Generation, gate: Throttle | None = None
    ) -> Copied:
        """Copy a committed generation and its bases.

        Raises GuardError where another directory has continued this run (fenced), and
        NoCheckpointError when retention has deleted the generation meanwhile.  Raises ConfigError
        where copies of another run are there, CorruptCheckpointError, StorageError.
        """
        text, commit = _local_commit(directory, generation)
        moved = sum(
            self.push(directory, base, gate).bytes for base in sorted(bases_of(commit.records))
        )
        there = self._objects.read(f"{generation.name}/COMMIT")
        if there is None:
            self._bring_records(directory)
            moved += self._bring_shards(directory, commit, gate or Unlimited())
            if _local_commit(directory, generation)[0] != text:  # else its files may be others
                raise StorageError(f"{generation}: its shards were written again; copy it anew")
            self._require_newest(directory)
            if not self._objects.create(f"{generation.name}/COMMIT", text):
                there = self._objects.read(f"{generation.name}/COMMIT")
            self._require_newest(directory)
        if there is not None and there != text and not self._is_whole_one_of(commit, there):
            raise GuardError(f"{self.url}: holds another {generation} than {directory.path}")
        return _copied(commit, moved)

    def _is_whole_one_of(self, commit: CommitFile, there: bytes) -> bool:
        """The store has it whole, and the directory has dropped its optimizer state since."""
        if not holds_weights_only(commit.records):
            return False
        copy = parse_commit(there, where=f"{self.url}/{commit.generation.name}/COMMIT")
        return replace(copy, records=commit.records).sealed() == commit

    def bytes_to_push(self, directory: CheckpointDirectory, generation: Generation) -> int:
        """Stored size of a generation and its bases, as far as they have not been copied.

        Raises what `push` raises for a generation that is gone or cannot be read.
        """
        left, known, total = [generation], set[Generation](), 0
        while left:
            one = left.pop()
            if one in known:
                continue
            known.add(one)
            _, commit = _local_commit(directory, one)
            left += bases_of(commit.records)
            if self._objects.read(f"{one.name}/COMMIT") is None:
                folder = directory.generation_path(one)
                with _local("read", folder):
                    names = _files(commit, where=folder)
                    total += sum(os.stat(os.path.join(folder, name)).st_size for name in names)
        return total

    def _bring_records(self, directory: CheckpointDirectory) -> None:
        """Copy the records of the run, of the directory's claims, and of each incarnation's
        parent."""
        with _local("read", directory.path):
            self._require_run(directory, read_small(os.path.join(directory.path, "RUN")))
            newest = self._newest_term()
            for number, name in _terms(os.listdir(os.path.join(directory.path, "terms"))):
                if number >= newest:
                    self._bring_claim(directory, name)
            self._require_newest(directory)
            folder = os.path.join(directory.path, "decisions")
            there = self._names("decisions")
            for number, name in _terms(os.listdir(folder)):
                if name not in there or number >= newest:
                    self._objects.write(f"decisions/{name}", read_small(os.path.join(folder, name)))

    def _require_run(self, directory: CheckpointDirectory, text: bytes) -> None:
        if self._objects.create("RUN", text):
            return
        mine, theirs = from_json(RunFile, text, where=directory.path).run_id, self.run_id()
        if mine != theirs:
            raise ConfigError(
                f"{self.url}: holds copies of run {theirs}, and {directory.path} is of run {mine}; "
                "name another prefix, or bring that run back into an empty directory"
            )

    def _bring_claim(self, directory: CheckpointDirectory, name: str) -> None:
        text = read_small(os.path.join(directory.path, "terms", name))
        if (
            not self._objects.create(f"terms/{name}", text)
            and self._objects.read(f"terms/{name}") != text
        ):
            raise self._fenced(directory, name)

    def _newest_term(self) -> int:
        return max((number for number, _ in _terms(self._names("terms"))), default=0)

    def _require_newest(self, directory: CheckpointDirectory) -> None:
        """The newest claim in the store is the directory's own."""
        name = f"t-{self._newest_term():06d}"
        with contextlib.suppress(FileNotFoundError):
            path = os.path.join(directory.path, "terms", name)
            if self._objects.read(f"terms/{name}") == read_small(path):
                return
        raise self._fenced(directory, name)

    def _fenced(self, directory: CheckpointDirectory, name: str) -> GuardError:
        return GuardError(
            f"{self.url}: fenced: another directory than {directory.path} continues this run "
            f"since claim {name}; what is trained here is not copied any more"
        )

    def _bring_shards(
        self, directory: CheckpointDirectory, commit: CommitFile, gate: Throttle
    ) -> int:
        folder = directory.generation_path(commit.generation)
        there = self._objects.sizes(commit.generation.name)
        moved = 0
        for name in _files(commit, where=folder):
            path = os.path.join(folder, name)
            with _local("read", path):
                size = os.stat(path).st_size
                if there.get(name) != size:
                    self._objects.upload(path, f"{commit.generation.name}/{name}", size, gate)
                    moved += size
        there = self._objects.sizes(commit.generation.name)
        short = [n for n in _files(commit, where=folder) if n not in there]
        if short:
            raise StorageError(f"{self.url}/{commit.generation.name}: {short[0]} is not there")
        return moved

    # ------------------------------------------------------------------ what is there

    def run_id(self) -> str | None:
        """Return the id of the run in the store; None: no run.

        Raises CorruptCheckpointError, StorageError.
        """
        text = self._objects.read("RUN")
        if text is None:
            return None
        try:
            return from_json(RunFile, text, where=f"{self.url}/RUN").run_id
        except ConfigError as error:
            raise CorruptCheckpointError(str(error)) from None

    def commits(self) -> list[CommitFile]:
        """Every valid COMMIT of the run, oldest first.

        Raises CorruptCheckpointError when RUN is damaged, StorageError.
        """
        found, run_id = [], self.run_id()
        for name in self._generations():
            with contextlib.suppress(CorruptCheckpointError):
                text = self._objects.read(f"{name}/COMMIT")
                if text is not None:
                    commit = parse_commit(text, where=f"{self.url}/{name}/COMMIT")
                    if commit.generation.name == name and run_id in (None, commit.run_id):
                        found.append(commit)
        return sorted(found, key=lambda commit: commit.generation)

    def eligible(
        self, commits: Iterable[CommitFile], directory: CheckpointDirectory | None = None
    ) -> list[Generation]:
        """Return the generations that a restart may take, newest first.

        They are good, and on the lineage as the store and the directory know it.
        """
        commits = list(commits)
        chain = self._chain(map(_entry, commits), () if directory is None else directory.parents())
        good = {
            c.generation
            for c in commits
            if c.health == "good" and not holds_weights_only(c.records)
        }
        if directory is not None:
            good -= {generation for generation in good if _is_put_off(directory, generation)}
        return sorted((g for g in good if on_lineage(g, chain)), reverse=True)

    def missing(self, path: str) -> Generation | None:
        """The newest that a restart may take, if a checkpoint directory has nothing as new.

        None for a directory of another run.  Raises ConfigError where it continues this run beside
        another one whose copies are here, CorruptCheckpointError, StorageError.
        """
        directory, run_id, commits = CheckpointDirectory(path), self.run_id(), self.commits()
        found = self.eligible(commits, directory)
        if run_id is None or not found:
            return None
        if not os.path.exists(os.path.join(path, "RUN")):
            return found[0]
        entries = directory.catalogue(run_id)
        chain = self._chain([*map(_entry, commits), *entries], directory.parents())
        good = (entry.generation for entry in entries if is_good(entry))
        here = [generation for generation in good if on_lineage(generation, chain)]
        new = not here or found[0] > max(here)
        if not new or directory.open() != run_id:
            return None
        self._require_same_claim(directory)
        return found[0]

    def _require_same_claim(self, directory: CheckpointDirectory) -> None:
        """Raise ConfigError unless the newest claim in both places is the same.

        If two directories continued from the same checkpoint, every later claim differs, and
        neither has anything that the other could take.
        """
        with _local("read", directory.path):
            here = os.listdir(os.path.join(directory.path, "terms"))
            both = _terms(set(here) & set(self._names("terms")))
            name = f"terms/{both[-1][1]}" if both else ""
            if both and read_small(os.path.join(directory.path, name)) != self._objects.read(name):
                raise ConfigError(
                    f"{self.url}: another directory than {directory.path} continues this run, and "
                    "both trained on. Keep one: bring the copies back into an empty directory, or "
                    "name another prefix for the training here"
                )

    def _names(self, prefix: str) -> list[str]:
        return sorted(self._objects.sizes(prefix))

    def _generations(self) -> list[str]:
        names = []
        for name in self._objects.folders():
            with contextlib.suppress(ConfigError):
                names.append(Generation.from_name(name).name)
        return names

    def _chain(
        self, committed: Iterable[CatalogueEntry], decided: Iterable[TermParent] = ()
    ) -> tuple[TermParent, ...]:
        return newest_chain(parents_of([*self._decisions(), *decided], committed))

    def _decisions(self) -> list[TermParent]:
        found = []
        for number, name in _terms(self._names("decisions")):
            text = self._objects.read(f"decisions/{name}")
            with contextlib.suppress(CorruptCheckpointError):
                where = f"{self.url}/decisions/{name}"
                found.append(read_decision(text or b"", term=number, where=where))
        return found

    # ------------------------------------------------------------------ deleting

    def retire(self, keep_last: int) -> list[Generation]:
        """Delete all but the newest `keep_last` good generations, the pinned ones, and their bases.

        Also delete the remains of copies that were never completed.

        Return the deleted generations, oldest first.  Raises CorruptCheckpointError when RUN is
        damaged, StorageError.
        """
        commits = self.commits()
        catalogue = tuple(map(_entry, commits))
        doomed = deletions(catalogue, Retention(keep_last=keep_last), chain=self._chain(catalogue))
        pins = {each: "PINNED" for each in doomed if "PINNED" in self._names(each.name)}
        catalogue = tuple(replace(e, pinned=pins.get(e.generation, "")) for e in catalogue)
        doomed = unpinned(catalogue, doomed)
        check_deletions(catalogue, doomed)
        for generation in doomed:
            self._objects.delete(f"{generation.name}/COMMIT")
        whole = {commit.generation for commit in commits} - set(doomed)
        for name in self._generations():
            if whole and Generation.from_name(name) < max(whole):
                left = self._names(name)
                for file in filter(is_ours, left if "COMMIT" not in left else ()):
                    self._objects.delete(f"{name}/{file}")
        return list(doomed)

    # ------------------------------------------------------------------ bringing back

    def pull(
        self,
        path: str,
        generation: Generation | None = None,
        moved: Callable[[int], None] = _NOTHING,
        expect: Callable[[int], None] = _NOTHING,
    ) -> tuple[Copied, list[str]]:
        """Bring the newest eligible generation, or the named one, into a checkpoint directory.

        Its bases come too.  Also return sentences about generations set aside on the way.  Every
        byte is compared with its digest before the generation counts.  A damaged generation in the
        directory is set aside and brought once more; if it is damaged here, too, the next older one
        is brought.  `moved` hears of bytes, from several threads; `expect` hears how many come
        next.  Raises NoCheckpointError; ConfigError for a directory of another run, or of this run
        continued in two.  Raises
        CorruptCheckpointError when RUN is damaged, DirectoryBusyError for a directory that a live
        run holds, and StorageError.
        """
        commits = {commit.generation: commit for commit in self.commits()}
        wanted = self.eligible(commits.values(), CheckpointDirectory(path))
        if generation is not None:
            wanted = [generation] if generation in commits else []
        if not wanted:
            what = "no good checkpoint" if generation is None else f"no {generation}"
            raise NoCheckpointError(f"{self.url}: holds {what}")
        directory = self._begin(path)
        entries = [_entry(commit) for commit in commits.values()]
        told: list[str] = []
        for chosen in wanted:
            count, local = 0, []
            try:
                for needed in sorted(with_bases([chosen], entries)):
                    if needed not in commits:
                        raise CorruptCheckpointError(f"{chosen}: needs {needed}, which is not here")
                    fetched = self._fetch(directory, commits[needed], moved, expect)
                    count += fetched
                    local += [] if fetched else [commits[needed]]
                try:
                    _require_whole(directory, chosen, named=generation is not None)
                except CorruptCheckpointError:
                    healed = self._heal(directory, local, (moved, expect), told)
                    if not healed:
                        raise
                    count += healed
                    _require_whole(directory, chosen, named=generation is not None)
                return _copied(commits[chosen], count), told
            except CorruptCheckpointError as error:
                if os.path.isdir(directory.generation_path(chosen)):
                    with _local("set aside", directory.generation_path(chosen)):
                        told.append(set_aside(directory.path, chosen.name, f"{self.url}: {error}"))
                else:
                    told.append(f"{chosen}: {error}")
        raise NoCheckpointError(f"{self.url}: no checkpoint came back whole: {'; '.join(told)}")

    def _heal(
        self,
        directory: CheckpointDirectory,
        local: Iterable[CommitFile],
        hears: tuple[Callable[[int], None], Callable[[int], None]],
        told: list[str],
    ) -> int:
        """Brings once more what the directory had, oldest first, and had damaged; bytes of it."""
        count = 0
        for commit in local:
            name = commit.generation.name
            result = verify_generation(directory.path, name)
            if result.damaged:
                why = f"damaged; brought back from a copy: {'; '.join(result.problems[:3])}"
                with _local("set aside", directory.generation_path(commit.generation)):
                    told.append(set_aside(directory.path, name, why))
                count += self._fetch(directory, commit, *hears)
        return count

    def _begin(self, path: str) -> CheckpointDirectory:
        """Identity, the newest claim and the lineage stand in the directory, if they did not."""
        directory = CheckpointDirectory(path)
        theirs, run = self.run_id(), self._objects.read("RUN")
        if theirs is None or run is None:
            raise NoCheckpointError(f"{self.url}: holds no run (RUN is not there)")
        with _local("write", path):
            for name in ("", "terms", "decisions"):
                new_files.make_directory(os.path.join(path, name))
            if not os.path.exists(os.path.join(path, "RUN")):
                publish(os.path.join(path, "RUN"), run, replace=False)
            mine = directory.open()
            if mine != theirs:
                raise ConfigError(
                    f"{path}: is of run {mine}, and {self.url} holds copies of run {theirs}; name "
                    "an empty directory"
                )
            directory.require_unheld()
            self._require_same_claim(directory)
            newest = self._newest_term()
            if newest and self._record_here(directory, f"terms/t-{newest:06d}"):
                directory.release(newest)  # whoever made that claim does not hold this directory
            for name in self._names("decisions"):
                self._record_here(directory, f"decisions/{name}")
        return directory

    def _record_here(self, directory: CheckpointDirectory, name: str) -> bool:
        """Whether the directory got a record that it did not have."""
        text = self._objects.read(name)
        return text is not None and publish(os.path.join(directory.path, name), text, replace=False)

    def _fetch(
        self,
        directory: CheckpointDirectory,
        commit: CommitFile,
        moved: Callable[[int], None],
        expect: Callable[[int], None],
    ) -> int:
        """Bytes fetched of one generation; 0 when it is there."""
        folder = directory.generation_path(commit.generation)
        if os.path.exists(os.path.join(folder, "CORRUPT")) or _is_damaged(f"{folder}/COMMIT"):
            with _local("set aside", folder):
                why = "damaged; brought back from a copy"
                set_aside(directory.path, commit.generation.name, why)
        elif _holds_less(f"{folder}/COMMIT", commit):
            with _local("set aside", folder):
                why = "weights only; brought back whole from a copy"
                set_aside(directory.path, commit.generation.name, why)
        target = os.path.join(directory.create_generation(commit.generation), "COMMIT")
        if os.path.exists(target):
            return 0
        sizes = self._objects.sizes(commit.generation.name)
        expect(sum(sizes.get(name, 0) for name in _files(commit, where=self.url)))
        total = 0
        for name in _files(commit, where=self.url):
            if name not in sizes:
                raise CorruptCheckpointError(f"{self.url}/{commit.generation.name}: lacks {name}")
            path = os.path.join(folder, name)
            with _local("write", path):
                self._objects.download(f"{commit.generation.name}/{name}", path, sizes[name], moved)
            total += sizes[name]
        text = self._objects.read(f"{commit.generation.name}/COMMIT")
        if text is None:
            raise CorruptCheckpointError(f"{commit.generation}: was deleted while it was fetched")
        with _local("write", target):
            publish(target, text, replace=False)
        return total


def _copied(commit: CommitFile, moved: int) -> Copied:
    return Copied(
        generation=commit.generation, step=commit.step, created_s=commit.created_s, bytes=moved
    )


def _local_commit(
    directory: CheckpointDirectory, generation: Generation
) -> tuple[bytes, CommitFile]:
    path = os.path.join(directory.generation_path(generation), "COMMIT")
    try:
        text = read_small(path)
    except FileNotFoundError:
        raise NoCheckpointError(f"{path}: is not there, or was deleted meanwhile") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot read: {error.strerror}") from error
    return text, parse_commit(text, where=path)


def _is_put_off(directory: CheckpointDirectory, generation: Generation) -> bool:
    """A person set it aside in the directory, or its numbers turned out to be suspect there: its
    copy is no better."""
    folder = directory.generation_path(generation)
    return any(os.path.exists(os.path.join(folder, mark)) for mark in ("QUARANTINE", "SUSPECT"))


def _is_damaged(path: str) -> bool:
    """Whether a COMMIT is there that fails verification.  Raises StorageError."""
    with _local("read", path), contextlib.suppress(FileNotFoundError):
        try:
            read_commit(path)
        except CorruptCheckpointError:
            return True
    return False


def _holds_less(path: str, copy: CommitFile) -> bool:
    """Whether a COMMIT is of weights, and its copy is whole.  Raises StorageError."""
    with _local("read", path), contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
        return holds_weights_only(read_commit(path).records) > holds_weights_only(copy.records)
    return False


def _require_whole(directory: CheckpointDirectory, generation: Generation, *, named: bool) -> None:
    """Every byte in the directory is what its digest says, and no number is NaN unless `named`.

    Raises CorruptCheckpointError, or StorageError where it could not be read.
    """
    result = verify_generation(directory.path, generation.name)
    if result.problems:
        told = "; ".join(result.problems[:3])
        raise CorruptCheckpointError(told) if result.damaged else StorageError(told)
    if result.sick:
        directory.mark(generation, "SUSPECT")
        if not named:
            raise CorruptCheckpointError(result.sick)
    directory.mark(generation, "VERIFIED")
    directory.mark_ever_committed()


def _files(commit: CommitFile, *, where: str) -> list[str]:
    """Indices and shards that a COMMIT names.  Raises CorruptCheckpointError."""
    names = [str(record.get(key)) for record in commit.records for key in ("index", "file")]
    for name in names:
        if not is_ours(name) or not name.startswith(("shard-", "idx-")):
            raise CorruptCheckpointError(f"{where}: COMMIT names {name!r:.60}, which is no shard")
    return names


def _entry(commit: CommitFile) -> CatalogueEntry:
    """Return a copy's entry for retention and lineage; every copy was read back before upload."""
    return CatalogueEntry(
        generation=commit.generation, step=commit.step, world_size=commit.world_size,
        parent=commit.parent, records=commit.records, created_s=commit.created_s, verified=True,
        layout_digests=tuple(str(r.get("layout_digest", "")) for r in commit.records),
        health="good" if commit.health == "good" else "suspect",
    )  # fmt: skip


def _terms(names: Iterable[str]) -> list[tuple[int, str]]:
    found = ((match, name) for name in names if (match := _TERM.fullmatch(name)))
    return sorted((int(match[1]), name) for match, name in found)


@contextlib.contextmanager
def _local(verb: str, path: str) -> Iterator[None]:
    """An error of the file system is a StorageError that names the file."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and verb != "write":
            gone = error.filename or path
            raise NoCheckpointError(f"{gone}: was deleted meanwhile") from error
        raise StorageError(f"{error.filename or path}: cannot {verb}: {error.strerror}") from error
