"""Store: a directory of generations in which an operation happened or did not."""

import contextlib
import errno
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from autockpt.executors.storage.directory import claims as claims_module
from autockpt.executors.storage.directory import commits as commits_module
from autockpt.executors.storage.directory import lease as lease_module
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import read_commit
from autockpt.executors.storage.places.file_system import FileSystem
from autockpt.values.errors import (
    AutockptError,
    ConfigError,
    CorruptCheckpointError,
    DirectoryBusyError,
    GuardError,
    StorageError,
)
from autockpt.values.generation import Generation
from autockpt.values.record import to_json
from tests.contracts.faults import Death, Failure, Killed

G1, G2 = Generation(term=1, step=10), Generation(term=1, step=20)
MANY = 400
"""More calls than any operation makes."""


class DirectoryContract:
    """Subclass and set `make`: a directory object on a path, as one process would have it."""

    make: ClassVar[Callable[[Path], CheckpointDirectory]]

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """Where the checkpoints go; does not exist yet."""
        return tmp_path / "checkpoints"

    def opened(self, path: Path) -> tuple[CheckpointDirectory, str]:
        """(directory, run id), term 1 claimed."""
        directory = self.make(path)
        run_id = directory.open()
        assert directory.claim(run_id, "launch", 0, force=False) == 1
        return directory, run_id

    def records(self, directory: CheckpointDirectory, generation: Generation) -> tuple[Any, ...]:
        """One shard and its index, on disk."""
        folder = Path(directory.create_generation(generation))
        (folder / "shard-00000-a1.safetensors").write_bytes(b"shard" * 100)
        (folder / "idx-00000-a1.json").write_bytes(b"{}")
        return (
            {"rank": 0, "file": "shard-00000-a1.safetensors", "index": "idx-00000-a1.json",
             "bytes": 500, "root": "ab"},
        )  # fmt: skip

    def commit(self, directory: CheckpointDirectory, run_id: str, generation: Generation) -> Path:
        """Commits; the COMMIT's path."""
        directory.write_commit(
            run_id, generation, step=generation.step, world_size=1, parent=None,
            records=self.records(directory, generation), health="good",
        )  # fmt: skip
        return Path(directory.generation_path(generation)) / "COMMIT"

    def listed(self, directory: CheckpointDirectory, run_id: str) -> list[Generation]:
        return [entry.generation for entry in directory.catalogue(run_id)]

    # ----------------------------------------------------------------- identity

    def test_the_run_id_is_made_once(self, path: Path) -> None:
        """Whoever opens later, or at the same time, gets the same."""
        ids = {self.make(path).open() for _ in range(3)}
        assert len(ids) == 1
        assert len(ids.pop()) == 32

    def test_openers_at_the_same_time_agree(self, path: Path) -> None:
        """Eight threads, one RUN."""
        assert len(set(in_threads(8, lambda i: self.make(path).open()))) == 1

    @pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b'{"schema_version":2}'])
    def test_a_damaged_run_file_is_named(self, path: Path, text: bytes) -> None:
        """Not replaced, not guessed."""
        self.opened(path)
        (path / "RUN").write_bytes(text)
        with pytest.raises(ConfigError, match="RUN: "):
            self.make(path).open()
        assert (path / "RUN").read_bytes() == text

    def test_another_format_is_refused(self, path: Path) -> None:
        """The directory of an older or a newer autockpt is not written to."""
        self.opened(path)
        text = (path / "RUN").read_text()
        for other in (1, 3):
            (path / "RUN").write_text(text.replace('"format":2', f'"format":{other}'))
            before = sorted(path.rglob("*"))
            with pytest.raises(
                ConfigError, match=rf"written in format {other}, .* format 2\. Resume"
            ):
                self.make(path).open()
            assert sorted(path.rglob("*")) == before

    def test_a_place_that_cannot_be_a_directory_is_a_storage_error(self, tmp_path: Path) -> None:
        """A file stands there."""
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StorageError, match=r"cannot be used for checkpoints: .*disk\.path"):
            self.make(tmp_path / "file").open()

    # ----------------------------------------------------------------- lease

    def test_the_same_launch_takes_over_at_once(self, path: Path) -> None:
        """A restart within a launch needs no waiting."""
        directory, run_id = self.opened(path)
        assert self.make(path).claim(run_id, "launch", 1, force=False) == 2
        assert not directory.holds(1)
        assert directory.holds(2)

    def test_threads_never_win_the_same_term(self, path: Path) -> None:
        """Eight claims at once: eight terms, each with one owner."""
        self.opened(path)
        terms = in_threads(8, lambda i: self.make(path).claim("run", "launch", i, force=False))
        assert sorted(terms) == list(range(2, 10))
        holder = self.make(path).highest_term()
        assert holder is not None
        assert terms[holder.restart_round] == 9

    def test_of_eight_foreign_processes_one_wins(self, path: Path) -> None:
        """All alive, none forces: one owner, seven are told who it is."""
        self.make(path).open()
        answers = in_processes(8, lambda i: self.make(path).claim("run", f"l{i}", 0, force=False))
        assert sorted(a for a in answers if isinstance(a, int)) == [1]
        assert sum("owned by another live run" in str(a) for a in answers) == 7

    def test_processes_that_force_win_one_term_each(self, path: Path) -> None:
        """A known-dead predecessor does not make two owners of one term."""
        self.make(path).open()
        answers = in_processes(8, lambda i: self.make(path).claim("run", f"l{i}", 0, force=True))
        assert sorted(answers) == list(range(1, 9))

    def test_a_live_holder_on_this_machine_is_named(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Same boot, same pid, same start time: it lives."""
        self.opened(path)
        monkeypatch.setattr(os, "getpid", lambda: 999_999_999)
        with pytest.raises(DirectoryBusyError, match=r"launch launch, keeper pid \d+ on .* term 1"):
            self.make(path).claim("run", "other", 0, force=False)

    def test_a_reused_pid_is_no_holder(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pids return; start times do not."""
        self.opened(path)
        monkeypatch.setattr(os, "getpid", lambda: 999_999_999)
        monkeypatch.setattr(claims_module, "pid_start", lambda pid: 1)
        assert self.make(path).claim("run", "other", 0, force=False) == 2

    @pytest.mark.parametrize("beats", [True, False])
    @pytest.mark.parametrize("elsewhere", ["boot_id", "pid_namespace"])
    def test_a_holder_elsewhere_lives_while_its_heart_beats(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, beats: bool, elsewhere: str
    ) -> None:
        """On another machine or in another container; by our own clock, whatever theirs says."""
        directory, run_id = self.opened(path)
        clock = [0.0]

        def sleep(seconds: float) -> None:
            clock[0] += seconds
            if beats and clock[0] > 3:
                directory.heartbeat(1)

        monkeypatch.setattr(claims_module, elsewhere, lambda: "another")
        monkeypatch.setattr(lease_module.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(lease_module.time, "sleep", sleep)
        if beats:
            with pytest.raises(DirectoryBusyError, match="owned by another live run"):
                self.make(path).claim(run_id, "other", 0, force=False)
            assert clock[0] < 5
        else:
            assert self.make(path).claim(run_id, "other", 0, force=False) == 2
            assert clock[0] >= FileSystem.patience_s

    @pytest.mark.parametrize("here", [True, False])
    def test_the_pid_in_an_older_claim_counts_on_a_host_of_its_name(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
    ) -> None:
        """It does not say in which container the pid is one."""
        self.opened(path)
        claim = path / "terms" / "t-000001"
        data = json.loads(claim.read_text())
        del data["pid_namespace"]
        host = data["host"] if here else "another"
        claim.write_text(json.dumps(data | {"host": host, "pid": 999_999_999}))
        asked: list[float] = []
        monkeypatch.setattr(FileSystem, "patience_s", 0.1)
        monkeypatch.setattr(lease_module.time, "sleep", asked.append)
        assert self.make(path).claim("run", "other", 0, force=False) == 2
        assert bool(asked) is not here

    # ----------------------------------------------------------------- fence

    def test_an_older_term_neither_commits_nor_decides(self, path: Path) -> None:
        """The late writer of a replaced incarnation leaves nothing that counts."""
        old, run_id = self.opened(path)
        assert self.make(path).claim(run_id, "launch", 1, force=False) == 2
        records = self.records(old, G1)
        with pytest.raises(GuardError, match="term 1 is fenced by a newer incarnation"):
            old.write_commit(
                run_id, G1, step=1, world_size=1, parent=None, records=records, health="good"
            )
        with pytest.raises(GuardError, match="term 1 is fenced"):
            old.write_decision(1, 2, G1, "late")
        assert self.listed(old, run_id) == []
        assert old.parents() == ()

    def test_a_claim_during_the_commit_makes_it_no_success(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Checked again afterwards: the owner must not say durable when it was replaced."""
        old, run_id = self.opened(path)
        real = os.link

        def link(source: str, target: str) -> None:
            real(source, target)
            if target.endswith("COMMIT"):
                self.make(path).claim(run_id, "launch", 1, force=False)

        monkeypatch.setattr(os, "link", link)
        with pytest.raises(GuardError, match="fenced"):
            self.commit(old, run_id, G1)

    def test_a_commit_whose_generation_a_newer_term_has_deleted_is_fenced(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is not an error of the storage: whoever is fenced has to leave."""
        directory, run_id = self.opened(path)
        records = self.records(directory, G1)
        publish = commits_module.publish

        def overtaken(name: str, text: bytes, *, replace: bool) -> bool:
            if name.endswith("COMMIT"):
                monkeypatch.undo()
                newer = self.make(path)
                newer.claim(run_id, "launch", 1, force=False)
                newer.trash(G1)
            return publish(name, text, replace=replace)

        monkeypatch.setattr(commits_module, "publish", overtaken)
        with pytest.raises(GuardError, match="term 1 is fenced"):
            directory.write_commit(
                run_id, G1, step=10, world_size=1, parent=None, records=records, health="good"
            )

    def test_decisions_are_the_lineage(self, path: Path) -> None:
        """The newest attempt of a term stands; a foreign or damaged file is no decision."""
        directory, run_id = self.opened(path)
        directory.write_decision(1, 1, None, "nothing there")
        assert [(e.term, e.parent) for e in directory.parents()] == [(1, None)]
        directory.claim(run_id, "launch", 1, force=False)
        directory.write_decision(2, 1, G2, "newest")
        directory.write_decision(2, 2, G1, "the newest was bad")
        for name, text in {
            "x": "[]",
            "y": "3",
            "z": "{",
            "t-000009": '{"term":[],"parent":null}',
        }.items():
            (path / "decisions" / name).write_text(text)
        assert [(e.term, e.parent) for e in directory.parents()] == [(1, None), (2, G1)]

    # ----------------------------------------------------------------- commit

    def test_a_commit_is_listed_with_everything_it_says(self, path: Path) -> None:
        """By this object and by any other."""
        directory, run_id = self.opened(path)
        self.commit(directory, run_id, G2)
        self.commit(directory, run_id, G1)
        entries = self.make(path).catalogue(run_id)
        assert [entry.generation for entry in entries] == [G1, G2]
        assert (entries[1].step, entries[1].world_size, entries[1].health) == (20, 1, "good")
        assert entries[1].records[0]["file"] == "shard-00000-a1.safetensors"
        assert (entries[1].verified, entries[1].corrupt, entries[1].quarantined) == (False,) * 3

    def test_marks_are_seen(self, path: Path) -> None:
        """VERIFIED and CORRUPT are ours, QUARANTINE is a person's."""
        directory, run_id = self.opened(path)
        folder = self.commit(directory, run_id, G1).parent
        directory.mark(G1, "VERIFIED")
        directory.mark(G1, "CORRUPT")
        (folder / "QUARANTINE").touch()
        (entry,) = directory.catalogue(run_id)
        assert (entry.verified, entry.corrupt, entry.quarantined) == (True,) * 3

    def test_a_pinned_checkpoint_is_not_deleted(self, path: Path) -> None:
        """Until its pin is removed by name; a name is that of one checkpoint."""
        directory, run_id = self.opened(path)
        folder = self.commit(directory, run_id, G1).parent
        self.commit(directory, run_id, G2)
        person = self.make(path)
        person.pin(G1, "paper")
        assert [entry.pinned for entry in directory.catalogue(run_id)] == ["paper", ""]
        before = sorted(os.listdir(folder))
        with pytest.raises(GuardError, match="is pinned as 'paper' and stays"):
            directory.delete(G1)
        assert sorted(os.listdir(folder)) == before
        with pytest.raises(ConfigError, match=f"is the name of {G1.name}; remove that pin first"):
            person.pin(G2, "paper")
        with pytest.raises(ConfigError, match="no checkpoint is pinned as 'other'; pins: paper"):
            person.unpin("other")
        assert person.unpin("paper") == G1
        directory.delete(G1)
        assert [entry.generation for entry in directory.catalogue(run_id)] == [G2]
        with pytest.raises(ConfigError, match="holds no committed checkpoint"):
            person.pin(G1, "paper")
        with pytest.raises(ConfigError, match="expected letters, digits"):
            person.pin(G2, "../x")
        with pytest.raises(ConfigError, match=r"a number, which names a step"):
            person.pin(G2, "210")

    def test_a_pin_and_a_deletion_at_once_agree(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The pin comes when the COMMIT is on its way out: either it holds, or it says so."""
        directory, run_id = self.opened(path)
        for generation, late in ((G1, True), (G2, False)):
            folder = self.commit(directory, run_id, generation).parent
            person, rename, unlink = self.make(path), os.rename, os.unlink
            said: list[str] = []

            def pin_now(
                person: CheckpointDirectory = person,
                generation: Generation = generation,
                said: list[str] = said,
            ) -> None:
                monkeypatch.undo()
                with contextlib.suppress(ConfigError):
                    person.pin(generation, "now")
                    said.append("pinned")

            def renamed(*args: Any, late: bool = late, rename: Any = rename) -> None:
                if not late:
                    pin_now()
                rename(*args)

            def unlinked(*args: Any, late: bool = late, unlink: Any = unlink) -> None:
                if late:
                    pin_now()
                unlink(*args)

            monkeypatch.setattr(os, "rename", renamed)
            monkeypatch.setattr(os, "unlink", unlinked)
            with contextlib.suppress(GuardError):
                directory.delete(generation)
            assert (folder / "COMMIT").exists() == bool(said) == (not late)

    def test_a_commit_of_another_run_or_place_is_not_ours(self, path: Path) -> None:
        """A copied folder is not chosen under another name."""
        directory, run_id = self.opened(path)
        commit = self.commit(directory, run_id, G1)
        os.rename(commit.parent, path / G2.name)
        assert directory.catalogue(run_id) == ()
        os.rename(path / G2.name, commit.parent)
        assert directory.catalogue("another run") == ()
        assert self.listed(directory, run_id) == [G1]

    @pytest.mark.parametrize(("failures", "found"), [(1, (G1, G2)), (99, (G1,))])
    def test_a_commit_that_cannot_be_read_for_a_moment_is_not_passed_over(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, found: tuple[Generation]
    ) -> None:
        """Resuming the older one would abandon it for ever; one that never can be is left out."""
        directory, run_id = self.opened(path)
        for generation in (G1, G2):
            self.commit(directory, run_id, generation)
        left, real = [None] * failures, os.open

        def opened(name: Any, *more: Any, **how: Any) -> int:
            if str(name).endswith(f"{G2.name}/COMMIT") and left:
                left.pop()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(name, *more, **how)

        monkeypatch.setattr(os, "open", opened)
        assert tuple(entry.generation for entry in directory.catalogue(run_id)) == found

    @pytest.mark.parametrize(
        ("failures", "found"), [(1, [(G1, "good"), (G2, "suspect")]), (99, [(G1, "good")])]
    )
    def test_a_mark_that_cannot_be_looked_for_is_not_missing(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, found: list[Any]
    ) -> None:
        """Else a state with NaN would be good while the storage is ill."""
        directory, run_id = self.opened(path)
        for generation in (G1, G2):
            self.commit(directory, run_id, generation)
        assert directory.mark(G2, "SUSPECT")
        self.ill(monkeypatch, f"{G2.name}/SUSPECT", failures)
        assert [(e.generation, e.health) for e in directory.catalogue(run_id)] == found

    def test_what_may_have_a_commit_is_not_trash(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A storage that cannot say is no reason to remove a checkpoint."""
        directory, run_id = self.opened(path)
        self.commit(directory, run_id, G1)
        with monkeypatch.context() as ill:
            self.ill(ill, f"{G1.name}/COMMIT", 99)
            with pytest.raises(StorageError, match="cannot look for: Input/output error"):
                directory.trash(G1)
        assert self.listed(directory, run_id) == [G1]

    @staticmethod
    def ill(monkeypatch: pytest.MonkeyPatch, end: str, failures: int) -> None:
        """Looking for a file ends in EIO so often."""
        left, real = [None] * failures, os.stat

        def looked(name: Any, *more: Any, **how: Any) -> os.stat_result:
            if str(name).endswith(end) and left:
                left.pop()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(name, *more, **how)

        monkeypatch.setattr(os, "stat", looked)

    def test_an_error_of_the_storage_is_told_as_what_it_is(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not as "File exists", which says nothing of a disk that is ill."""
        directory, _ = self.opened(path)
        self.ill(monkeypatch, "terms", 99)
        with pytest.raises(StorageError, match="Input/output error; name another directory"):
            directory.open()

    def test_every_flipped_byte_makes_a_commit_unreadable(self, path: Path) -> None:
        """And it leaves the catalogue."""
        directory, run_id = self.opened(path)
        commit = self.commit(directory, run_id, G1)
        whole = commit.read_bytes()
        for place in range(len(whole)):
            for bit in (0, 5):
                damaged = bytearray(whole)
                damaged[place] ^= 1 << bit
                commit.write_bytes(damaged)
                with pytest.raises(CorruptCheckpointError, match="COMMIT"):
                    read_commit(str(commit))
        assert directory.catalogue(run_id) == ()
        for cut in (0, 1, len(whole) // 2, len(whole) - 1):
            commit.write_bytes(whole[:cut])
            with pytest.raises(CorruptCheckpointError, match="COMMIT"):
                read_commit(str(commit))
        commit.write_bytes(whole + b" ")
        assert directory.catalogue(run_id) == ()
        commit.write_bytes(whole)
        assert self.listed(directory, run_id) == [G1]

    @pytest.mark.parametrize(
        "changes",
        [
            {"world_size": 2},
            {"records": ({"bytes": "many"},)},
            {"records": ({"deep": json.loads("[" * 400 + "]" * 400)},)},
        ],
        ids=["shards missing", "no number", "deep"],
    )
    def test_a_commit_that_makes_no_sense_is_unreadable(
        self, path: Path, changes: dict[str, Any]
    ) -> None:
        """Its digest is right: anybody can compute one."""
        directory, run_id = self.opened(path)
        commit = self.commit(directory, run_id, G1)
        hostile = replace(read_commit(str(commit)), **changes).sealed()
        commit.write_text(to_json(hostile))
        with pytest.raises(CorruptCheckpointError, match="COMMIT"):
            read_commit(str(commit))
        assert directory.catalogue(run_id) == ()

    def test_what_is_no_file_is_no_commit(self, path: Path) -> None:
        """A pipe does not hang, a link is not followed, 17 MiB are not read."""
        directory, run_id = self.opened(path)
        commit = self.commit(directory, run_id, G1)
        whole = commit.rename(commit.with_name("real"))
        os.mkfifo(commit)
        assert directory.catalogue(run_id) == ()
        commit.unlink()
        commit.symlink_to(whole)
        assert directory.catalogue(run_id) == ()
        commit.unlink()
        with commit.open("wb") as file:
            file.truncate(17 * 2**20)
        assert directory.catalogue(run_id) == ()

    def test_a_commit_is_never_replaced(self, path: Path) -> None:
        """Not even by its own term."""
        directory, run_id = self.opened(path)
        commit = self.commit(directory, run_id, G1)
        before = commit.read_bytes()
        with pytest.raises(StorageError, match="COMMIT: exists already"):
            self.commit(directory, run_id, G1)
        assert commit.read_bytes() == before

    def test_a_commit_that_reads_back_differently_is_not_made(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The disk lies: better no checkpoint than one that is believed."""
        directory, run_id = self.opened(path)
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(len(data))))
        with pytest.raises(StorageError, match="reads back differently"):
            self.commit(directory, run_id, G1)
        assert directory.catalogue(run_id) == ()

    # ----------------------------------------------------------------- death at every step

    def test_death_at_any_call_of_a_commit_leaves_old_or_new(self, path: Path) -> None:
        """For every N: after a death before call N the catalogue reads, and holds G1 or both."""
        seen: list[int] = []
        for at in range(MANY):
            directory, run_id = self.opened(path / str(at))
            self.commit(directory, run_id, G1)
            records = self.records(directory, G2)
            died = dies(
                at,
                lambda d=directory, r=run_id, rec=records: d.write_commit(  # type: ignore[misc]
                    r, G2, step=20, world_size=1, parent=G1, records=rec, health="good"
                ),
            )
            found = self.listed(self.make(path / str(at)), run_id)
            assert found in ([G1], [G1, G2])
            seen.append(len(found))
            if not died:
                break
        assert seen == sorted(seen), "a longer life never leaves less"
        assert (seen[0], seen[-1]) == (1, 2)
        assert len(seen) > 8

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
    def test_an_error_at_any_call_of_a_commit_is_told(self, path: Path, code: int) -> None:
        """StorageError means old or new; no error means new."""
        for at in range(MANY):
            directory, run_id = self.opened(path / str(at))
            self.commit(directory, run_id, G1)
            records = self.records(directory, G2)
            failed = False
            with Failure(at, code).armed() as failure:
                try:
                    directory.write_commit(
                        run_id, G2, step=20, world_size=1, parent=G1, records=records, health="good"
                    )
                except (AutockptError, OSError):
                    failed = True
            found = self.listed(self.make(path / str(at)), run_id)
            assert found in ([G1], [G1, G2])
            assert failed or found == [G1, G2]
            if failure.calls <= at:
                break
        assert at > 8

    def test_death_at_any_call_of_a_claim_leaves_a_readable_lease(self, path: Path) -> None:
        """Nobody is locked out by half a claim."""
        for at in range(MANY):
            directory, run_id = self.opened(path / str(at))
            died = dies(at, lambda d=directory, r=run_id: d.claim(r, "launch", 1, force=False))  # type: ignore[misc]
            holder = self.make(path / str(at)).highest_term()
            assert holder is not None
            assert holder.term in (1, 2)
            assert self.make(path / str(at)).claim(run_id, "launch", 2, force=False) > holder.term
            if not died:
                break
        assert at > 8

    def test_death_at_any_call_of_a_decision_leaves_old_or_new(self, path: Path) -> None:
        """The lineage is never half a file."""
        for at in range(MANY):
            directory, _ = self.opened(path / str(at))
            directory.write_decision(1, 1, None, "first")
            died = dies(at, lambda d=directory: d.write_decision(1, 2, G1, "second"))  # type: ignore[misc]
            (entry,) = self.make(path / str(at)).parents()
            assert entry.parent in (None, G1)
            if not died:
                break
        assert entry.parent == G1

    def test_death_at_any_call_of_a_delete_leaves_all_or_nothing(self, path: Path) -> None:
        """COMMIT goes first: a listed generation has all its files."""
        for at in range(MANY):
            directory, run_id = self.opened(path / str(at))
            folder = self.commit(directory, run_id, G1).parent
            self.commit(directory, run_id, G2)
            died = dies(at, lambda d=directory: d.delete(G1))  # type: ignore[misc]
            found = self.listed(self.make(path / str(at)), run_id)
            assert found in ([G1, G2], [G2])
            if G1 in found:
                assert (folder / "shard-00000-a1.safetensors").exists()
                assert (folder / "idx-00000-a1.json").exists()
            if not died:
                break
        assert found == [G2]

    # ----------------------------------------------------------------- removal

    def test_a_committed_generation_is_no_trash(self, path: Path) -> None:
        """A readable COMMIT or a damaged one: a person may want to look."""
        directory, run_id = self.opened(path)
        commit = self.commit(directory, run_id, G1)
        with pytest.raises(GuardError, match="has a COMMIT and is not trash"):
            directory.trash(G1)
        commit.write_bytes(b"damaged")
        with pytest.raises(GuardError, match="has a COMMIT and is not trash"):
            directory.trash(G1)

    def test_a_commit_that_comes_while_its_generation_is_trashed_stays(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A coordinator that stood still between its look at the term and its COMMIT."""
        directory, run_id = self.opened(path)
        records = self.records(directory, G1)
        rename = os.rename

        def overtaken(source: str, target: str) -> None:
            monkeypatch.undo()
            old = self.make(path)
            old.write_commit(
                run_id, G1, step=10, world_size=1, parent=None, records=records, health="good"
            )
            rename(source, target)

        monkeypatch.setattr(os, "rename", overtaken)
        directory.trash(G1)
        assert self.listed(directory, run_id) == [G1]
        assert list((path / "trash").iterdir()) == []

    def test_trash_and_delete_leave_nothing_behind(self, path: Path) -> None:
        """Neither the folder nor its bytes; what was not there is no error."""
        directory, run_id = self.opened(path)
        self.records(directory, G1)
        directory.trash(G1)
        directory.trash(G1)
        commit = self.commit(directory, run_id, G2)
        size = len(commit.read_bytes())
        assert directory.delete(G2) == 500 + 2 + size
        assert directory.delete(G2) == 0
        assert not (path / G1.name).exists()
        assert not (path / G2.name).exists()
        assert list((path / "trash").iterdir()) == []

    def test_foreign_files_stay_where_they_are(self, path: Path) -> None:
        """Notes in a generation, folders beside it, other people's terms."""
        directory, run_id = self.opened(path)
        folder = self.commit(directory, run_id, G1).parent
        self.records(directory, G2)
        foreign = [
            folder / "notes.txt", path / G2.name / "notes.txt", path / "ckpt-mine" / "data",
            path / "README", path / "terms" / "t-note", path / "terms" / "t-000001~",
        ]  # fmt: skip
        for file in foreign:
            file.parent.mkdir(exist_ok=True)
            file.write_text("precious")
        assert self.listed(directory, run_id) == [G1]
        assert directory.holds(1)
        directory.delete(G1)
        directory.trash(G2)
        directory.empty_trash()
        assert [file.read_text() for file in foreign] == ["precious"] * len(foreign)
        assert sorted(file.name for file in folder.iterdir()) == ["notes.txt"]
        assert directory.catalogue(run_id) == ()

    def test_trash_of_an_earlier_process_is_emptied(self, path: Path) -> None:
        """What a death left half removed."""
        directory, _ = self.opened(path)
        (path / "trash" / f"{G1.name}-0123abcd").mkdir()
        (path / "trash" / f"{G1.name}-0123abcd" / "shard").write_bytes(b"x")
        directory.empty_trash()
        assert list((path / "trash").iterdir()) == []

    # ----------------------------------------------------------------- small files

    def test_an_index_is_written_once(self, path: Path) -> None:
        """Exclusively; an error leaves no half of it."""
        directory, _ = self.opened(path)
        target = Path(directory.create_generation(G1)) / "idx"
        directory.write_index(str(target), b"text")
        assert target.read_bytes() == b"text"

    @pytest.mark.parametrize("name", ["write", "fsync"])
    def test_a_failed_index_is_removed(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """A storage error, and the name is free again."""
        directory, _ = self.opened(path)
        target = Path(directory.create_generation(G1)) / "idx"

        def fail(*_: Any) -> Any:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, name, fail)
        with pytest.raises(StorageError, match="idx: cannot write: Input/output error"):
            directory.write_index(str(target), b"text")
        assert not target.exists()

    def test_an_index_that_exists_is_kept(self, path: Path) -> None:
        """Writing it again is an error and does not remove the first one."""
        directory, _ = self.opened(path)
        target = Path(directory.create_generation(G1)) / "idx"
        directory.write_index(str(target), b"text")
        with pytest.raises(StorageError, match="idx: cannot write: File exists"):
            directory.write_index(str(target), b"other")
        assert target.read_bytes() == b"text"

    def test_ever_committed_is_remembered(self, path: Path) -> None:
        """Deleting every generation does not make the next start silent."""
        directory, _ = self.opened(path)
        assert not directory.ever_committed()
        directory.mark_ever_committed()
        directory.mark_ever_committed()
        assert self.make(path).ever_committed()


def dies(at: int, work: Callable[[], object]) -> bool:
    """Runs `work` in a process that dies before its call number `at`; False: it lived."""
    with Death(at).armed():
        try:
            work()
        except Killed:
            return True
    return False


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(i)` in `count` threads at the same time."""
    start = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(i: int) -> None:
        start.wait()
        results[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def in_processes(count: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(i)`, or its error's text, in processes that all live until the last has answered."""
    context = multiprocessing.get_context("fork")
    start, end = context.Barrier(count), context.Barrier(count)
    answers = context.SimpleQueue()

    def run(i: int) -> None:
        start.wait()
        try:
            answers.put(work(i))
        except AutockptError as error:
            answers.put(str(error))
        end.wait()

    processes = [context.Process(target=run, args=(i,)) for i in range(count)]
    for process in processes:
        process.start()
    results = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    return results
