"""The checkpoint directory: lease, shards, commits, retention.

* `RUN`: run id and format, created with the directory.
* `JOB`: the job that it belongs to; in an object store only, where no run directory may be left.
* `terms/t-000007`: one file per incarnation, which is never replaced: the fence.
* `ckpt-t0007-step-00000042/`: shard-00003-a1.safetensors, idx-00003-a1.json, ..., COMMIT.
* `decisions/t-000007`: the generation that an incarnation resumed from: the lineage.
* `trash/`: everything is renamed into it before it is removed.
* `spare/`: shard files of retired generations, kept for their blocks.

Truth is the listing of valid COMMITs, each written last.  An operation either happened or did not;
nothing is repaired by guessing.  The directory stands on a file system, or in an object store under
a URL: `places` has what the two offer.  Used from one thread at a time.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from autockpt.executors.linux.mounts import is_mounted
from autockpt.executors.protocol.messages import (
    CatalogueEntry,
    Health,
    Record,
    TermParent,
    holds_weights_only,
)
from autockpt.executors.storage.claims import TermFile, is_alive, is_visible, own_claim, start_of
from autockpt.executors.storage.file_reuse import ReusableFiles
from autockpt.executors.storage.lineage import decision_text, read_decision
from autockpt.executors.storage.places.choose import absolute, place_of
from autockpt.executors.storage.places.place import MAX_RECORD_BYTES, always
from autockpt.executors.storage.places.store import read_patiently
from autockpt.executors.storage.places.unfinished_uploads import end_uploads_before
from autockpt.values.errors import (
    AutockptError,
    ConfigError,
    CorruptCheckpointError,
    DirectoryBusyError,
    GuardError,
    NoCheckpointError,
    OptionError,
    StorageError,
)
from autockpt.values.generation import Generation
from autockpt.values.record import from_json, to_json
from autockpt.values.same_job import Job, differences

FORMAT = 2
_T = TypeVar("_T")
_TERM = re.compile(r"t-\d{6}")
_OURS = re.compile(
    r"(shard|idx)-\d{5}-[aw]\d+\.(safetensors|json)|VERIFIED|CORRUPT|SUSPECT|PINNED|COMMIT(\.\w+\.tmp)?"
)
"""Files of a generation that go with it, beside those its COMMIT lists."""
GOING = "COMMIT.going.tmp"
"""COMMIT of a checkpoint that is being deleted."""
_PIN = re.compile(r"[A-Za-z0-9_][\w.-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """RUN: who the directory belongs to."""

    schema_version: int = 1
    run_id: str
    format: int
    created: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFile:
    """COMMIT: the generation is complete."""

    schema_version: int = 1
    run_id: str
    generation: Generation
    step: int
    world_size: int
    parent: Generation | None
    records: tuple[dict[str, Any], ...]
    """Per rank: file, index, bytes, root, layout_digest."""
    health: str
    created_s: float
    digest: str = ""
    """sha256 of this record with an empty digest."""

    def sealed(self) -> "CommitFile":
        """This record with its digest."""
        from dataclasses import replace

        plain = replace(self, digest="")
        return replace(plain, digest=hashlib.sha256(to_json(plain).encode()).hexdigest())


class CheckpointDirectory:
    """All file operations of the protocol on one directory."""

    def __init__(self, path: str) -> None:
        self.path = absolute(path)
        self._place = place_of(path)
        self._unclear: set[Generation] = set()
        """Generations whose COMMIT a store refused with an error: it may have taken it."""
        self._run: RunFile | None = None
        """The run file, as it was opened."""
        self._mount = ""
        """Where the file system is mounted that it was opened on; "" where that is not known."""
        self._claim: TermFile | None = None
        """The claim that this process made, or found when it went on with a running term."""
        self._decision = b""
        """The decision of that term as it was written."""
        self.spares = ReusableFiles(self.path)

    # ------------------------------------------------------------------ identity and lease

    def open(self, run_id: str = "") -> str:
        """Creates the directory if needed; the run id.  Raises StorageError.

        `run_id`: of a run that lives, for a directory that has none.
        """
        path = self.path
        require_format(path)
        try:
            for name in ("", "terms", "decisions", "trash"):
                path = os.path.join(self.path, name)
                self._place.make_folder(path)
            path = os.path.join(self.path, "RUN")
            if not _is_there(path):
                former = self._former_run() if self._place.is_store else ""
                run = RunFile(
                    run_id=former or run_id or secrets.token_hex(16),
                    format=FORMAT,
                    created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                )
                publish(path, to_json(run).encode(), replace=False)
            run = from_json(RunFile, read_small(path), where=path)
            self._mount = self._place.mount_of(self.path)
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be used for checkpoints: {path}: {error.strerror}; name "
                "another directory with disk.path in the policy"
            ) from error
        self._run = run
        return run.run_id

    def _former_run(self) -> str:
        """The run whose RUN is gone from a store, as its COMMITs say; "": there is none yet.

        Raises NoCheckpointError where they do not agree, ConfigError for a store that cannot be
        trusted with a run, StorageError, OSError.
        """
        found: set[str] = set()
        generations = self._generations()
        for generation in generations:
            path = os.path.join(self.generation_path(generation), "COMMIT")
            with contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
                found.add(read_patiently(path, partial(read_commit, path)).run_id)
        if generations and len(found) != 1:
            raise NoCheckpointError(
                f"{self.path}: holds {len(generations)} checkpoints and no RUN, and their COMMITs "
                f"name {len(found)} runs, expected 1. A rule of the bucket may have deleted them. "
                "Put RUN back from an older version of the object, or name another place with "
                "disk.path"
            )
        if not generations:
            self._require_conditions()
        return "".join(found)

    def _require_conditions(self) -> None:
        """Puts an object twice: a store that takes both cannot fence a run.

        Raises ConfigError, OSError.
        """
        path = os.path.join(self.path, f"probe.{secrets.token_hex(6)}.tmp")
        try:
            self._place.publish(path, b"first", replace=False)
            if self._place.publish(path, b"second", replace=False):
                raise ConfigError(
                    f"{self.path}: the store ignores the condition of a put (If-None-Match: *): it "
                    "replaced an object. Two starts could both hold this run. Use a store that "
                    "honours conditional puts"
                )
        finally:
            with contextlib.suppress(OSError):
                self._place.remove(path)

    def _generations(self) -> list[Generation]:
        """The generations that are listed, also damaged ones.  Raises StorageError."""
        found = []
        for name in _names(self.path):
            with contextlib.suppress(ConfigError):
                found.append(Generation.from_name(name))
        return sorted(found)

    def claim_job(self, text: bytes, *, replace: bool) -> bool:
        """Leaves the record of the job whose checkpoints are here; False where there is one.

        Raises StorageError.
        """
        path = os.path.join(self.path, "JOB")
        with _storage("write", path):
            return self._place.publish(path, text, replace=replace)

    def take_job(self, job: Job, *, own_launches: frozenset[str] = frozenset()) -> None:
        """Leaves the record of a job that may go on with the checkpoints of another one.

        Raises DirectoryBusyError while a live run of the other job has them, unless its launch is
        one of `own_launches`; StorageError.
        """
        if self.differences(job):
            holder = self.highest_term()
            if holder is not None and holder.launch_id not in own_launches:
                self._require_dead(holder)
        self.claim_job(to_json(job).encode(), replace=True)

    def job(self) -> bytes:
        """That record; nothing where there is none.  Raises StorageError."""
        path = os.path.join(self.path, "JOB")
        with _storage("read", path), contextlib.suppress(FileNotFoundError):
            return self._place.read(path)
        return b""

    def differences(self, job: Job) -> list[str]:
        """What makes `job` another one than the store's; [] where it is the same, or unknown.

        Raises StorageError.
        """
        try:
            there = from_json(Job, self.job() or to_json(job).encode(), where=f"{self.path}/JOB")
        except ConfigError:
            return []  # written by a later version
        same = os.path.basename(there.script) == os.path.basename(job.script)
        return differences(there, job, same_script=same)

    def require_writable(self) -> None:
        """Opens the directory and writes a page into it.  Raises StorageError when it cannot."""
        self.open()
        path = os.path.join(self.path, "terms", f"probe.{secrets.token_hex(6)}.tmp")
        try:
            self._place.write(path, bytes(4096))
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be written: {error.strerror}; free space or make it "
                "writable, or name another directory with disk.path in the policy; older "
                "checkpoints are untouched"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                self._place.remove(path)

    def highest_term(self) -> TermFile | None:
        """The newest claim, or None; of a damaged one all but its number is unknown.

        Raises StorageError.
        """
        names = sorted(n for n in _names(os.path.join(self.path, "terms")) if _TERM.fullmatch(n))
        if not names:
            return None
        path = os.path.join(self.path, "terms", names[-1])
        term = int(names[-1][2:])
        with _storage("read", path), contextlib.suppress(ConfigError, CorruptCheckpointError):
            found = from_json(TermFile, read_small(path), where=path)
            if found.term == term:
                return found
        return TermFile(
            term=term, run_id="", launch_id="?", restart_round=0, host="?", boot_id="", pid=0,
            pid_start=0, nonce="",
        )  # fmt: skip

    def claim(
        self,
        run_id: str,
        launch_id: str,
        restart_round: int,
        *,
        force: bool,
        after: int = 0,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> int:
        """Claims the next term; its number, which is greater than `after`.

        It is also greater than that of each generation: claims may have been deleted.
        The same launch takes over at once; a foreign one only when its holder is dead (`force`
        states that it is known to be).  `is_wanted` is asked when the claim only has to be linked.
        Raises DirectoryBusyError naming the holder, GuardError when it is not wanted any more,
        StorageError.
        """
        for _ in range(100):
            holder = self.highest_term()
            if holder is not None and not force and holder.launch_id != launch_id:
                self._require_dead(holder)
            written = max((g.term for g in self._generations()), default=0)
            term = max(holder.term if holder else 0, after, written) + 1
            mine = own_claim(term, run_id, launch_id, restart_round)
            path = os.path.join(self.path, "terms", f"t-{term:06d}")
            with _storage("look for", os.path.dirname(path)):
                doubtful = self._place.is_store or self._place.lacks_folder(os.path.dirname(path))
            if doubtful and self._run is not None:
                self._make_again()
            with _storage("claim", path):
                if publish(path, to_json(mine).encode(), replace=False, is_wanted=is_wanted):
                    self._claim, self._decision = mine, b""
                    return term
        raise DirectoryBusyError(f"{self.path}: lost 100 races for the lease; try again")

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats."""
        return self._place.heartbeat_s

    @property
    def claimed_term(self) -> int:
        """Of the claim that this process made last, or went on with; 0: of none."""
        return 0 if self._claim is None else self._claim.term

    def holds(self, term: int) -> bool:
        """True while `term` is the newest claim, and that of the launch that made it."""
        newest = self.highest_term()
        return newest is not None and newest.term == term and not self._is_foreign(newest)

    def _is_foreign(self, claim: TermFile) -> bool:
        """Another start has taken the same number, in a directory that was made again."""
        mine = self._claim
        known = mine is not None and mine.term == claim.term and bool(claim.launch_id != "?")
        return known and mine is not None and start_of(mine) != start_of(claim)

    def go_on(self, term: int, run_id: str, launch_id: str, restart_round: int) -> None:
        """A new keeper of a running term: the claim may be gone with the directory's contents.

        Raises GuardError when a newer term exists, StorageError.
        """
        newest = self.highest_term()
        if newest is not None and newest.term == term and newest.launch_id == launch_id:
            self._claim = newest
            return
        if newest is not None and newest.term >= term:
            raise self._fenced(term)
        self._claim = own_claim(term, run_id, launch_id, restart_round)
        self._decision = b""  # the other keepers know it, and each COMMIT says it
        self.renew(term)

    def renew(self, term: int) -> bool:
        """Makes the directory again where its claim is gone; True when it had to be.

        A claim that is missing is not a newer one: the directory was emptied, unmounted, or made
        again.  Raises GuardError when a newer term exists, StorageError when it cannot be used.
        """
        if not self._is_claim_missing(term):
            return False
        mine = self._claim
        if mine is None or mine.term != term or self._run is None:
            raise self._gone(term, "and this process did not make it")
        self._make_again()
        path = os.path.join(self.path, "decisions", f"t-{term:06d}")
        with _storage("write", path):
            if self._decision:
                publish(path, self._decision, replace=True)
        path = os.path.join(self.path, "terms", f"t-{term:06d}")
        with _storage("claim", path):
            publish(path, to_json(mine).encode(), replace=False)
        if self._is_claim_missing(term):
            raise self._gone(term, "also after it was made again")
        return True

    def _make_again(self) -> None:
        """Folders and RUN as they were; not on a mount point, and not in the directory of another
        run.  Raises StorageError."""
        assert self._run is not None
        with _storage("look for the mount point of", self.path):
            if not is_mounted(self._mount):
                raise StorageError(
                    f"{self.path}: nothing is mounted at {self._mount}; mount it again"
                )
        for name in ("", "terms", "decisions", "trash"):
            path = os.path.join(self.path, name)
            with _storage("make again", path):
                self._place.make_folder(path, parents=False)
        path = os.path.join(self.path, "RUN")
        with _storage("make again", path):
            publish(path, to_json(self._run).encode(), replace=False)
            found = from_json(RunFile, read_small(path), where=path)
        if found.run_id != self._run.run_id:
            raise StorageError(
                f"{self.path}: belongs to run {found.run_id} now, expected {self._run.run_id}; "
                "give that run another --run-dir"
            )

    def _is_claim_missing(self, term: int) -> bool:
        """Raises GuardError when a newer one, or another start's, is there; StorageError."""
        newest = self.highest_term()
        if newest is not None and (newest.term > term or self._is_foreign(newest)):
            raise self._fenced(term)
        return newest is None or newest.term < term

    def _fenced(self, term: int) -> GuardError:
        return GuardError(f"{self.path}: term {term} is fenced by a newer incarnation")

    def _gone(self, term: int, what: str) -> StorageError:
        return StorageError(
            f"{self.path}: emptied, unmounted or made again: the claim of term {term} is gone, "
            f"{what}"
        )

    def release(self, term: int) -> None:
        """The holder is done though its process lives on: the next run may claim at once."""
        with contextlib.suppress(OSError):
            self._place.write(self._left(term), b"")

    def _left(self, term: int) -> str:
        return os.path.join(self.path, "terms", f"t-{term:06d}.left")

    def heartbeat(self, term: int) -> None:
        """Shows holders elsewhere that we are alive."""
        path = os.path.join(self.path, "terms", "heartbeat")
        with contextlib.suppress(OSError):
            self._place.write(path, f"{term} {secrets.token_hex(4)}\n".encode())

    def require_unheld(self) -> None:
        """Raises DirectoryBusyError naming the live run that holds the directory."""
        holder = self.highest_term()
        if holder is not None:
            self._require_dead(holder)

    def _require_dead(self, holder: TermFile) -> None:
        left = self._left(holder.term)
        with _storage("look for", left):
            if _is_there(left):
                return
        if not (is_alive(holder) if is_visible(holder) else self._beats()):
            return
        raise DirectoryBusyError(
            f"{self.path}: owned by another live run (launch {holder.launch_id}, keeper pid "
            f"{holder.pid} on {holder.host}, term {holder.term}); stop that run first, or use "
            "another --run-dir"
        )

    def _beats(self) -> bool:
        """Whether the heartbeat changes within the patience of the storage.

        Storage that cannot be read says neither.  Raises StorageError.
        """
        path = os.path.join(self.path, "terms", "heartbeat")
        with _storage("read", path):
            before = read_patiently(path, self._heartbeat_text)
            deadline = time.monotonic() + self._place.patience_s
            while True:
                time.sleep(self._place.heartbeat_s / 10)
                is_over = time.monotonic() >= deadline
                try:
                    now = self._heartbeat_text()
                except OSError:
                    if not is_over:
                        continue
                    now = read_patiently(path, self._heartbeat_text)
                if now != before or is_over:
                    return now != before

    def _heartbeat_text(self) -> bytes:
        """Of the holder; none where none was left.  Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return read_small(os.path.join(self.path, "terms", "heartbeat"))
        return b""

    # ------------------------------------------------------------------ generations

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
            raise self._gone(generation.term, "so nothing is written there") from None
        except OSError as error:
            raise StorageError(f"{path}: cannot create: {error.strerror}") from error
        return path

    def write_index(self, path: str, text: bytes) -> None:
        """Writes an index file beside its shard and makes both names durable."""
        with _storage("write", path):
            self._place.write_new(path, text)

    def write_commit(
        self, run_id: str, generation: Generation, *, step: int, world_size: int,
        parent: Generation | None, records: tuple[Record, ...], health: Health,
    ) -> float:  # fmt: skip
        """Writes COMMIT; seconds since 1970.

        Raises GuardError (fenced) when a newer term exists before or after, StorageError else.
        """
        self._require_term(generation.term)
        self._require_bases(records)
        created_s = time.time()
        commit = CommitFile(
            run_id=run_id, generation=generation, step=step, world_size=world_size,
            parent=parent, records=records, health=health, created_s=created_s,
        ).sealed()  # fmt: skip
        path = os.path.join(self.generation_path(generation), "COMMIT")
        text = to_json(commit).encode()
        try:
            with _storage("commit", path):
                if not publish(path, text, replace=False):
                    raise StorageError(f"{path}: exists already")
        except StorageError:
            if not self._stands(path, text):
                self._unclear.add(generation)
                with contextlib.suppress(StorageError):
                    self._require_term(generation.term)  # a newer one may have deleted it
                raise
        self._require_term(generation.term)
        return created_s

    def _stands(self, path: str, text: bytes) -> bool:
        """Whether a store took a COMMIT though its answer was an error, as far as it says."""
        with contextlib.suppress(AutockptError, OSError):
            return self._place.is_store and read_patiently(path, lambda: read_small(path)) == text
        return False

    def _require_term(self, term: int) -> None:
        if self._is_claim_missing(term):
            raise self._gone(term, "so nothing is committed there")

    def _require_bases(self, records: tuple[Record, ...]) -> None:
        """Raise StorageError if a shard's base, which another process may remove, is gone."""
        for name in {str(record["base"]) for record in records if record.get("base")}:
            commit = os.path.join(self.path, name, "COMMIT")
            with _storage("read", commit):
                if not _is_whole(commit):
                    raise StorageError(f"{commit}: is gone, and a shard is a difference to it")

    def write_decision(
        self, term: int, attempt: int, generation: Generation | None, reason: str
    ) -> None:
        """Records what an incarnation resumes from.  Raises GuardError (fenced), StorageError."""
        self._require_term(term)
        path = os.path.join(self.path, "decisions", f"t-{term:06d}")
        with _storage("write", path):
            text = decision_text(term, attempt, generation, reason)
            publish(path, text, replace=True)
            self._decision = text

    def parents(self) -> tuple[TermParent, ...]:
        """The lineage on disk; damaged records are none.

        Raises StorageError when one cannot be read: without it an abandoned generation may look
        like the newest.
        """
        found = []
        directory = os.path.join(self.path, "decisions")
        for name in sorted(filter(_TERM.fullmatch, _names(directory))):
            path = os.path.join(directory, name)
            with contextlib.suppress(CorruptCheckpointError), _storage("read", path):
                found.append(read_decision(read_small(path), term=int(name[2:]), where=path))
        return tuple(found)

    def catalogue(self, run_id: str) -> tuple[CatalogueEntry, ...]:
        """Every valid COMMIT of this run, oldest first.

        One that a disk cannot read, twice, is left out, like a shard that cannot be read.
        Raises StorageError when the directory itself cannot be: nothing there would mean from
        scratch.  So it does for a COMMIT in a store that cannot be read for minutes.
        """
        entries = []
        for name in sorted(_names(self.path)):
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
            return _is_there(os.path.join(folder, mark)) if seen is None else mark in seen

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

    def is_suspect(self, generation: Generation) -> bool:
        """It was marked so when it was read back.  Raises OSError."""
        return _is_there(os.path.join(self.generation_path(generation), "SUSPECT"))

    def mark(self, generation: Generation, name: str) -> bool:
        """Leaves a mark (VERIFIED, CORRUPT, SUSPECT) in a generation; False when it cannot.

        It survives a power cut before the next mark is left: VERIFIED without the SUSPECT before
        it would say that the numbers are sound.  Any other lost one is harmless.
        """
        folder = self.generation_path(generation)
        try:
            self._place.write(os.path.join(folder, name), b"")
            self._place.settle(folder)
        except OSError:
            return False
        return True

    def pin(self, generation: Generation, name: str) -> None:
        """Keeps a checkpoint under a name; retention passes it over.

        Raises ConfigError for a name that is taken or malformed and where there is no checkpoint,
        StorageError.
        """
        folder = self.generation_path(generation)
        commit = os.path.join(folder, "COMMIT")
        require_pin_name(name)
        other = self.pins().get(name)
        if other is not None and other != generation:
            raise ConfigError(f"{name}: is the name of {other.name}; remove that pin first")
        path = os.path.join(folder, "PINNED")
        with _storage("pin", folder):
            if not _is_there(commit):
                raise ConfigError(f"{folder}: holds no committed checkpoint; see `autockpt ls`")
            publish(path, f"{name}\n".encode(), replace=True)
            if not self._place.is_store:
                os.chmod(path, 0o644)  # of another user, the job reads it too
            if not _is_there(commit):
                self._place.remove(path)
                raise ConfigError(f"{folder}: was deleted meanwhile; pin another checkpoint")

    def unpin(self, name: str) -> Generation:
        """Lets retention decide again; the checkpoint.  Raises ConfigError, StorageError."""
        pins = self.pins()
        if name not in pins:
            known = ", ".join(sorted(pins)) or "none"
            raise ConfigError(f"{self.path}: no checkpoint is pinned as {name!r}; pins: {known}")
        path = os.path.join(self.generation_path(pins[name]), "PINNED")
        with _storage("remove", path):
            self._place.remove(path)
        return pins[name]

    def pins(self) -> dict[str, Generation]:
        """The pinned checkpoints by name.  Raises StorageError."""
        found = {}
        for name in _names(self.path):
            with contextlib.suppress(ConfigError):
                generation = Generation.from_name(name)
                with _storage("read", self.generation_path(generation)):
                    pinned = pin_of(self.generation_path(generation))
                if pinned:
                    found[pinned] = generation
        return found

    def mark_ever_committed(self) -> None:
        """Remembers that a restart must not silently begin from scratch."""
        path = os.path.join(self.path, "EVER")
        if not _exists(path):
            with contextlib.suppress(OSError):
                self._place.write(path, b"something was committed once\n")
                self._place.settle(self.path)

    def ever_committed(self) -> bool:
        """True when some generation was once committed to memory or disk.  Raises StorageError."""
        path = os.path.join(self.path, "EVER")
        with _storage("read", path):
            if self._place.is_store:  # a look at one object takes a missing bucket for an empty one
                return "EVER" in self._place.names(self.path)
            return _is_there(path)

    # ------------------------------------------------------------------ removal

    def trash(self, generation: Generation) -> None:
        """Moves an uncommitted generation away; refuses one with a COMMIT.

        Raises GuardError, or StorageError where the storage cannot say whether there is one.
        """
        path = self.generation_path(generation)
        commit = os.path.join(path, "COMMIT")
        if self._place.is_store and generation in self._unclear:
            raise GuardError(f"{path}: its COMMIT may still appear, and it is not trash")
        with _storage("look for", commit):
            if _is_there(commit):
                raise GuardError(f"{path}: has a COMMIT and is not trash")
        self._remove(path)

    def trash_unfinished(self, term: int) -> None:
        """Trashes what incarnations before `term` left without a COMMIT: now that it is claimed,
        none of it can become durable.

        Generations that a person set aside stay, and so do files that cannot be removed.
        """
        with contextlib.suppress(StorageError):
            for name in _names(self.path):
                with contextlib.suppress(AutockptError, OSError):  # no generation, or committed
                    generation = Generation.from_name(name)
                    path = self.generation_path(generation)
                    if generation.term >= term or _is_there(os.path.join(path, "QUARANTINE")):
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
        path = self.generation_path(generation)
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
        return freed

    def _remove(self, path: str, listed: frozenset[str] = frozenset()) -> None:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [name for name in self._place.names(path) if name in listed or is_ours(name)]
        self._place.discard(path, names, os.path.join(self.path, "trash"))

    def empty_trash(self) -> None:
        """Removes what an earlier process could not finish removing."""
        if self._place.is_store:
            return
        directory = os.path.join(self.path, "trash")
        names: list[str] = []
        with contextlib.suppress(StorageError):
            names = _names(directory)
        for name in names:
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
        self.spares.clear()


def require_format(directory: str) -> None:
    """Raise ConfigError where `directory` has a RUN of another format; nothing is changed there."""
    path = os.path.join(directory, "RUN")
    try:
        run = from_json(RunFile, read_small(path), where=path)
    except (OSError, AutockptError):
        return  # none yet, or damaged: reported where it is needed
    if run.format != FORMAT:
        raise ConfigError(
            f"{path}: written in format {run.format}, and this autockpt reads and writes format "
            f"{FORMAT}. Resume this run with the version that wrote it, or name a new directory"
        )


def publish(
    path: str, text: bytes, *, replace: bool, is_wanted: Callable[[], bool] = always
) -> bool:
    """Durable, whole, at once; False when it exists and may not be replaced.

    `is_wanted` is asked before it appears.  Raises GuardError when it is not, StorageError,
    OSError.
    """
    return place_of(path).publish(path, text, replace=replace, is_wanted=is_wanted)


def read_small(path: str, *, limit: int = MAX_RECORD_BYTES) -> bytes:
    """A record.  Raises CorruptCheckpointError when it is none, or OSError."""
    return place_of(path).read(path, limit=limit)


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


def _is_there(path: str) -> bool:
    """Whether a file is there: a mark that cannot be looked for is not missing.  Raises OSError."""
    return place_of(path).exists(path)


def _exists(path: str) -> bool:
    """Whether a file is there, as far as the storage says."""
    with contextlib.suppress(OSError):
        return _is_there(path)
    return False


def read_commit(path: str) -> CommitFile:
    """A COMMIT whose own digest matches.  Raises CorruptCheckpointError or OSError."""
    return parse_commit(read_small(path), where=path)


def parse_commit(text: bytes, *, where: str) -> CommitFile:
    """The record in a COMMIT.  Raises CorruptCheckpointError."""
    try:
        commit = from_json(CommitFile, text, where=where)
    except AutockptError as error:
        raise CorruptCheckpointError(str(error)) from None
    if commit.sealed().digest != commit.digest or to_json(commit).encode() != text:
        raise CorruptCheckpointError(f"{where}: its own digest does not match")
    if len(commit.records) != commit.world_size:
        raise CorruptCheckpointError(
            f"{where}: names {len(commit.records)} shards, expected {commit.world_size}"
        )
    numbers = ("bytes", "chunks", "chunk_bytes")
    if not all(isinstance(r.get(key, 0), int) for r in commit.records for key in numbers):
        raise CorruptCheckpointError(f"{where}: a shard's bytes or chunks are no number")
    return commit


def lossy_notice(what: str, lost: str) -> str:
    """Return the notice of every reader of a generation that has lost something."""
    return f"LOSSY: {what} is not what was trained, but close to it ({lost})"


def lossy_mark(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the losses that a COMMIT's shards record, before they were written; "" for none."""
    return next((str(record["lossy"]) for record in records if record.get("lossy")), "")


@contextlib.contextmanager
def _storage(verb: str, path: str) -> Iterator[None]:
    """An error of the operating system is a StorageError that names the file."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot {verb}: {error.strerror}") from error


def _names(path: str) -> list[str]:
    """Return the names in a folder; none if there is no folder.  Raises StorageError."""
    with _storage("list", path):
        return [name for name in place_of(path).names(path) if not name.endswith(".tmp")]


def _listed(path: str) -> tuple[list[str], frozenset[str]]:
    """(shard files by rank, all files) that a COMMIT lists; none when it cannot be read."""
    with contextlib.suppress(AutockptError, OSError):
        records = read_commit(path).records
        return [_plain(str(record.get("file"))) for record in records], files_of(records)
    return [], frozenset()


def files_of(records: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Names of the files that a commit lists."""
    return frozenset(str(record.get(key)) for record in records for key in ("file", "index"))


def _is_whole(commit: str) -> bool:
    """Whether a COMMIT stands, and its shards hold all state.  Raises OSError."""
    try:
        return not holds_weights_only(read_commit(commit).records)
    except (FileNotFoundError, CorruptCheckpointError):
        return False


def _plain(name: str) -> str:
    """Return a name in the generation's folder, for any name in a COMMIT."""
    return os.path.basename(name) or "none"


def _put_back(folder: str) -> None:
    """The COMMIT that a deletion has moved away."""
    with contextlib.suppress(OSError):
        place = place_of(folder)
        place.move(os.path.join(folder, GOING), os.path.join(folder, "COMMIT"))
        place.settle(folder)


def pin_of(folder: str) -> str:
    """The name under which a person keeps a checkpoint; "": there is none.  Raises OSError.

    A mark whose text cannot be read counts too; then it is the path, and the reason.
    """
    path = os.path.join(folder, "PINNED")
    try:
        text = read_small(path, limit=4096)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except CorruptCheckpointError:
        return path
    except PermissionError as error:
        return f"{path}: {error.strerror}"
    return text.decode(errors="replace").strip() or "PINNED"


def require_pin_name(name: str) -> None:
    """Raises OptionError."""
    if not _PIN.fullmatch(name):
        raise OptionError(f"{name!r:.80}: expected letters, digits, '-', '_' and '.', at most 64")


def is_ours(name: str) -> bool:
    """Whether a file of a generation is one that we write."""
    return bool(_OURS.fullmatch(name))
