"""Commits whose optimizer state is dropped: what stays, what a kill leaves, who may not."""

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from obstore.store import MemoryStore

from autockpt import new_files
from autockpt.cli import app
from autockpt.cli.jobs import preparation
from autockpt.executors.protocol.messages import holds_weights_only
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage import catalogue
from autockpt.executors.storage.catalogue import list_generations, verify_generation
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import (
    COMES_BACK,
    CommitFile,
    is_undecided,
    read_commit,
)
from autockpt.executors.storage.maintenance import leftovers, remove
from autockpt.executors.storage.places import file_system
from autockpt.executors.storage.places.file_system import FileSystem
from autockpt.executors.storage.places.store import StorePlace
from autockpt.executors.storage.remote import Objects, RemoteCopies
from autockpt.executors.storage.rewriting import commits
from autockpt.executors.storage.rewriting.commits import (
    KEPT_WHOLE,
    forget_rewritten,
    remove_replaced,
    replace_commit,
)
from autockpt.executors.storage.rewriting.weights_only import write_weights
from autockpt.executors.throttle.rate_limit import Unlimited
from autockpt.integrations.formats.tree.checkpoint_tree import GenerationTree
from autockpt.integrations.formats.tree.lazy_tree import materialised
from autockpt.values.errors import (
    AutockptError,
    ConfigError,
    CorruptCheckpointError,
    GuardError,
    StorageError,
)
from autockpt.values.generation import Generation
from autockpt.values.record import to_json
from tests.contracts.faults import Killed
from tests.unit.cli.scripts import ROOT
from tests.unit.executors.checkpoints import commit_images, commit_state, snapshot
from tests.unit.executors.states import DTYPES, Holder, Module, random_tensor, trained

G = Generation(term=1, step=4)


class Bench:
    """A directory with one commit of a training state."""

    def __init__(self, path: Path, *, codec: str = "none", place: str = "disk") -> None:
        scheme = "file://" if place == "store" else ""
        self.directory = CheckpointDirectory(f"{scheme}{path / 'checkpoints'}")
        self.run_id = self.directory.open()
        self.directory.claim(self.run_id, "launch", 0, force=False)
        model, optimizer = trained()
        odd = Module(
            (f"of_{dtype}", random_tensor(dtype, (5, 2), seed)) for seed, dtype in enumerate(DTYPES)
        )
        tied = torch.nn.Sequential(model[0], model[0])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        average = Holder({"mean": torch.arange(2000.0), "steps": 7})
        state = LiveState(
            {"model": model, "odd": odd, "tied": tied}, {"optimizer": optimizer},
            {"scheduler": scheduler, "average": average},
        )  # fmt: skip
        self.place = commit_state(self.directory, self.run_id, G, state, codec=codec, step=4)
        self.folder = Path(self.place.removeprefix(scheme))
        self.directory.mark(G, "VERIFIED")

    def replace(self, directory: CheckpointDirectory, term: int) -> None:
        """As a keeper does it: optimizer state goes, or what was written does."""
        commit, records = write_weights(directory, G, Unlimited(), term=term)
        try:
            replace_commit(directory, commit, records, term=term)
        except (AutockptError, OSError):
            forget_rewritten(directory, G, records, term=term)
            raise

    def is_as_it_was(self, commit: CommitFile) -> bool:
        """Whether the whole shards count; in a store the text of the COMMIT is another one."""
        now = self.commit
        plain = tuple({k: v for k, v in r.items() if k != KEPT_WHOLE} for r in now.records)
        return replace(now, records=plain).sealed() == commit

    def drop(self) -> CommitFile:
        """Optimizer state goes; the commit as it is then."""
        commit, records = write_weights(self.directory, G, Unlimited(), term=1)
        replace_commit(self.directory, commit, records, term=1)
        return self.commit

    @property
    def commit(self) -> CommitFile:
        """As it stands."""
        return read_commit(str(self.folder / "COMMIT"))

    def tree(self) -> dict[str, Any]:
        """All that a reader sees."""
        source = GenerationTree(str(self.folder))
        try:
            found: dict[str, Any] = materialised(source.tree)
            return found
        finally:
            source.close()

    def stored_bytes(self) -> int:
        """Of the shards."""
        return sum(path.stat().st_size for path in self.folder.glob("shard-*"))


def equal(one: Any, other: Any) -> bool:
    """Trees with the same values, to the bit."""
    if isinstance(one, torch.Tensor):
        raw = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
        return one.dtype == other.dtype and torch.equal(*raw)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


places = pytest.mark.parametrize("place", ["disk", "store"])


def replacing(
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: Callable[[], object] = lambda: None,
    behind: Callable[[], object] = lambda: None,
) -> None:
    """Something happens around each replacement of a COMMIT."""
    for kind in (FileSystem, StorePlace):

        def replace(*args: Any, real: Any = kind.replace, **more: Any) -> bool:
            before()
            done = bool(real(*args, **more))
            behind()
            return done

        monkeypatch.setattr(kind, "replace", replace)


@pytest.mark.parametrize(
    ("place", "codec"),
    [("disk", "none"), ("disk", "planes"), ("disk", "zstd"), ("store", "none"), ("store", "zstd")],
)
def test_everything_but_optimizers_stays_to_the_bit(tmp_path: Path, place: str, codec: str) -> None:
    """Of every dtype, tied weights, buffers, attached objects; in a fraction of the bytes."""
    bench = Bench(tmp_path, codec=codec, place=place)
    before = bench.tree()
    assert before.pop("optimizer")["state"]
    commit = bench.drop()
    assert holds_weights_only(commit.records)
    after = bench.tree()
    assert equal(before, after)
    assert after["model"]["tied.0.weight"] is after["model"]["tied.1.weight"]
    result = verify_generation(bench.directory.path, G.name)
    assert (result.ok, result.problems) == (True, ())
    (record,) = list_generations(bench.directory.path)
    assert (record.weights_only, record.state) == (True, "verified")
    assert record.bytes == bench.stored_bytes()
    (record,) = commit.records
    names = {path.name for path in bench.folder.iterdir()}
    assert names == {"COMMIT", "VERIFIED", record["index"], record["file"]}


def test_it_takes_a_fraction_of_the_bytes(tmp_path: Path) -> None:
    """AdamW keeps two values for each parameter."""
    bench = Bench(tmp_path)
    whole = bench.stored_bytes()
    bench.drop()
    assert bench.stored_bytes() < 0.7 * whole


def test_a_second_time_changes_nothing(tmp_path: Path) -> None:
    """As where the answer of the first was lost."""
    bench = Bench(tmp_path)
    first = bench.drop()
    commit, records = write_weights(bench.directory, G, Unlimited(), term=1)
    assert (commit, records) == (first, first.records)


def test_a_damaged_checkpoint_stays_as_it_is(tmp_path: Path) -> None:
    """Its optimizer state may be the part that a person can still read."""
    bench = Bench(tmp_path)
    shard = bench.folder / "shard-00000-a1.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5000] ^= 1
    shard.write_bytes(data)
    names = sorted(os.listdir(bench.folder))
    with pytest.raises(CorruptCheckpointError, match="expected digest"):
        write_weights(bench.directory, G, Unlimited(), term=1)
    assert sorted(os.listdir(bench.folder)) == names


@places
def test_a_pin_that_comes_meanwhile_keeps_it_whole(tmp_path: Path, place: str) -> None:
    """A person pins a checkpoint while its new shards are written."""
    bench = Bench(tmp_path, place=place)
    commit, records = write_weights(bench.directory, G, Unlimited(), term=1)
    bench.directory.pin(G, "paper")
    with pytest.raises(GuardError, match="pinned as 'paper' and stays whole"):
        replace_commit(bench.directory, commit, records, term=1)
    forget_rewritten(bench.directory, G, records, term=1)
    assert bench.is_as_it_was(commit)
    assert bench.tree()["optimizer"]["state"]
    assert not list(bench.folder.glob("*-w*.*"))


@places
def test_a_pin_in_the_last_moment_brings_the_commit_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Between the look and the new COMMIT: `pin` leaves its mark first and looks then."""
    bench = Bench(tmp_path, place=place)
    replacing(monkeypatch, before=lambda: (bench.folder / "PINNED").write_text("paper\n"))
    commit, records = write_weights(bench.directory, G, Unlimited(), term=1)
    with pytest.raises(GuardError, match="stays whole"):
        replace_commit(bench.directory, commit, records, term=1)
    assert bench.is_as_it_was(commit)
    assert verify_generation(bench.directory.path, G.name).ok


@places
@pytest.mark.parametrize("state", ["pinned", "not pinned", "new shard lost", "whole shard lost"])
def test_a_start_takes_back_what_a_kill_left_between_two_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, state: str
) -> None:
    """It may resume from the whole shards; no shard of the other kind is left."""
    bench = Bench(tmp_path, place=place)
    whole, records = write_weights(bench.directory, G, Unlimited(), term=1)

    def die() -> None:
        raise Killed("between")

    with monkeypatch.context() as patch:
        replacing(patch, behind=die)
        with pytest.raises(Killed, match="between"):
            replace_commit(bench.directory, whole, records, term=1)
    assert len(list(bench.folder.glob("shard-*"))) == 2
    assert verify_generation(bench.directory.path, G.name).ok
    assert leftovers(bench.directory.path) == []
    if state == "pinned":
        bench.directory.pin(G, "paper")
    elif state == "new shard lost":
        (bench.folder / str(records[0]["file"])).unlink()
    elif state == "whole shard lost":
        (bench.folder / str(whole.records[0]["file"])).unlink()
    remove_replaced(bench.directory, term=2)
    assert holds_weights_only(bench.commit.records) == (state == "whole shard lost")
    assert bench.commit.records == records or bench.is_as_it_was(whole)
    assert verify_generation(bench.directory.path, G.name).ok
    assert len(list(bench.folder.glob("shard-*"))) == 1


def left_between(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> CommitFile:
    """The COMMIT as it was; the disk is full from the second replacement on."""
    commit, records = write_weights(bench.directory, G, Unlimited(), term=1)
    with monkeypatch.context() as patch:
        patch.setattr(commits, "_swap", Full(commits._swap))
        with pytest.raises(OSError, match="No space left"):
            replace_commit(bench.directory, commit, records, term=1)
    assert is_undecided(bench.commit)
    return commit


@places
def test_a_checkpoint_between_two_commits_goes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Retention deletes the shards of both."""
    bench = Bench(tmp_path, place=place)
    left_between(bench, monkeypatch)
    bench.directory.delete(G)
    assert not bench.folder.exists() or not list(bench.folder.iterdir())


@places
def test_a_second_order_ends_what_a_full_disk_left_between_two_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Nothing is written again, and its record names no whole shards any more."""
    bench = Bench(tmp_path, place=place)
    left_between(bench, monkeypatch)
    between, records = write_weights(bench.directory, G, Unlimited(), term=1)
    assert is_undecided(between)
    replace_commit(bench.directory, between, records, term=1)
    assert bench.commit.records == records
    assert not is_undecided(bench.commit)
    assert len(list(bench.folder.glob("shard-*"))) == 1
    assert verify_generation(bench.directory.path, G.name).ok


def without_locks(*_: object) -> None:
    """Like a mount without the lock service."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


class Newer:
    """A newer start that comes while an older keeper replaces a COMMIT for the second time.

    The older one has compared the COMMIT, and its temporary file is not durable yet.
    """

    def __init__(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, *, pin: bool, at: str
    ) -> None:
        self._bench, self._pin, self._at = bench, pin, at
        self.directory = CheckpointDirectory(bench.directory.path)
        self.directory.open()
        self._replaced = 0
        self._real = FileSystem.publish
        monkeypatch.setattr(file_system, "LOCK_PATIENCE_S", 0.1)
        monkeypatch.setattr(FileSystem, "publish", self._publish)

    def _publish(self, path: str, text: bytes, **how: Any) -> bool:
        place = FileSystem()
        if not path.endswith("COMMIT"):
            return self._real(place, path, text, **how)
        self._replaced += 1
        if self._replaced == 1:
            done = self._real(place, path, text, **how)
            if self._at == "between":
                self._claim()
            return done
        if self._replaced == 2 and self._at == "between":
            self.decide()
        if self._replaced == 2 and self._at == "second":
            self._claim()
            self.decide()
        if self._replaced == 2 and self._at == "rename":
            asked, how = how["is_wanted"], dict(how)

            def late() -> bool:
                wanted = bool(asked())
                self._claim()
                self.decide()
                return wanted

            how["is_wanted"] = late
        return self._real(place, path, text, **how)

    def _claim(self) -> None:
        self.directory.claim(self._bench.run_id, "other", 0, force=True)
        if self._pin:
            self.directory.pin(G, "paper")

    def decide(self) -> None:
        """What its keeper does behind the decision."""
        remove_replaced(self.directory, term=2)


@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "not pinned"])
@pytest.mark.parametrize(
    ("at", "locks"),
    [
        ("between", True), ("between", False), ("second", True), ("second", False),
        ("rename", True),
    ],
)  # fmt: skip
def test_a_fenced_keeper_takes_no_shards_from_a_newer_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, *, locks: bool, pin: bool
) -> None:
    """Both decide the same COMMIT, at each place of the older one's replacement."""
    bench = Bench(tmp_path)
    commit, records = write_weights(bench.directory, G, Unlimited(), term=1)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", without_locks)
    newer = Newer(bench, monkeypatch, pin=pin, at=at)
    try:
        replace_commit(bench.directory, commit, records, term=1)
    except (AutockptError, OSError):
        forget_rewritten(bench.directory, G, records, term=1)
    # A fenced keeper decides nothing.
    assert is_undecided(bench.commit) == (at == "between" or (at == "second" and locks))
    assert verify_generation(bench.directory.path, G.name).ok
    newer.decide()
    assert verify_generation(bench.directory.path, G.name).ok
    assert holds_weights_only(bench.commit.records) == (at == "rename")
    assert not is_undecided(bench.commit)
    assert at == "rename" or bench.tree()["optimizer"]["state"]
    assert len(list(bench.folder.glob("shard-*"))) == 1


def test_a_lock_that_cannot_be_closed_undoes_no_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of NFS at the close comes behind the rename, and is none of the deletion."""
    bench, real, lock = Bench(tmp_path), os.close, new_files.lock
    locked, failed = set[int](), list[int]()

    def close(fd: int) -> None:
        real(fd)
        if fd in locked:
            locked.clear()
            failed.append(fd)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(new_files, "lock", lambda fd: locked.add(fd) or lock(fd))
    monkeypatch.setattr(os, "close", close)
    assert bench.directory.delete(G)
    monkeypatch.undo()
    assert len(failed) == 1
    assert not bench.folder.exists()


@pytest.mark.parametrize("locks", [True, False])
def test_a_replacement_brings_no_deleted_commit_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, locks: bool
) -> None:
    """A newer start deletes the checkpoint while the temporary file is written."""
    bench = Bench(tmp_path)
    commit, records = write_weights(bench.directory, G, Unlimited(), term=1)
    monkeypatch.setattr(file_system, "LOCK_PATIENCE_S", 0.1)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", without_locks)
    real = FileSystem.publish

    def publish(*args: Any, **how: Any) -> bool:
        monkeypatch.setattr(FileSystem, "publish", real)
        with contextlib.suppress(StorageError):
            bench.directory.delete(G)
        return real(*args, **how)

    monkeypatch.setattr(FileSystem, "publish", publish)
    with contextlib.suppress(StorageError):
        replace_commit(bench.directory, commit, records, term=1)
    assert not bench.folder.exists() or verify_generation(bench.directory.path, G.name).ok


@places
@pytest.mark.parametrize("state", ["undecided", "whole shards lost", "unreadable"])
def test_commands_say_whether_optimizer_state_comes_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    state: str,
) -> None:
    """The pin stands in any case, also where the commit cannot be read behind it."""
    bench = Bench(tmp_path, place=place)
    whole, path = left_between(bench, monkeypatch), bench.directory.path
    if state == "whole shards lost":
        (bench.folder / str(whole.records[0]["file"])).unlink()
    if state == "unreadable":
        (bench.folder / "COMMIT").write_text("{")
    assert app.run(["pin", path, "paper", "--generation", G.name]) == 0
    told = "".join(capsys.readouterr())
    assert bench.directory.pins() == {"paper": G}
    if state == "unreadable":
        assert "is pinned as paper and stays" in told
        assert f"{G.name}: its COMMIT cannot be read" in told
        return
    assert app.run(["ls", path]) == app.run(["show", path, G.name]) == 0
    told_after = capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds weights only") as refused:
        preparation._require_whole(path, G.name)
    comes_back = state == "undecided"
    assert (COMES_BACK in told, COMES_BACK in str(refused.value)) == (comes_back,) * 2
    assert told_after.count(COMES_BACK) == 2 * comes_back
    assert ("has dropped its optimizer state" in told) != comes_back
    remove_replaced(bench.directory, term=2)
    assert holds_weights_only(bench.commit.records) != comes_back


class Full:
    """Replacements on a disk that is full from the second one on."""

    def __init__(self, real: Callable[..., object]) -> None:
        self._real, self._calls = real, 0

    def __call__(self, *args: Any, **more: Any) -> object:
        self._calls += 1
        if self._calls > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._real(*args, **more)


@places
def test_a_fenced_term_replaces_nothing(tmp_path: Path, place: str) -> None:
    """A newer start may resume from exactly this one."""
    bench = Bench(tmp_path, place=place)
    commit, records = write_weights(bench.directory, G, Unlimited(), term=1)
    CheckpointDirectory(bench.directory.path).claim(bench.run_id, "other", 0, force=True)
    with pytest.raises(GuardError, match="fenced"):
        replace_commit(bench.directory, commit, records, term=1)
    assert bench.commit == commit


def test_a_store_that_ignores_the_condition_keeps_checkpoints_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked before anything is written; the question leaves nothing."""
    ignoring = Objects("memory:///run", store=MemoryStore())
    monkeypatch.setattr(
        Objects, "_put_over", lambda self, version, name, body: self.write(name, body)
    )
    with pytest.raises(StorageError, match=r"ignores the condition of a put \(If-Match\)"):
        ignoring.require_replacing("COMMIT.probe.tmp")
    assert ignoring.sizes("") == {}
    monkeypatch.undo()
    ignoring.require_replacing("COMMIT.probe.tmp")
    assert ignoring.sizes("") == {}


class Interrupted(Unlimited):
    """A keeper that is paused at one of its reads, until `meanwhile` is over."""

    def __init__(self, at: int, meanwhile: Callable[[], None]) -> None:
        self._at, self._meanwhile = at, meanwhile
        self.reads = 0

    def wait(self, nbytes: int) -> None:
        """Counts."""
        self.reads += 1
        if self.reads == self._at:
            self._meanwhile()


def two_ranks(tmp_path: Path, *, differ: bool = False, place: str = "disk") -> Bench:
    """A commit of two images, which differ in the parameters or are the same."""
    bench = Bench(tmp_path, place=place)
    model, optimizer = trained()
    state = LiveState({"model": model}, {"optimizer": optimizer}, {})
    images = []
    for _ in range(2):
        arena, shape = snapshot(state, progress={"step": 4})
        images.append(memoryview(bytes(arena.view[: shape.layout.image_bytes])))
        if differ:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
    bench.directory.delete(G)
    commit_images(bench.directory, bench.run_id, G, images, step=4)
    bench.directory.mark(G, "VERIFIED")
    return bench


@places
@pytest.mark.parametrize("newer", [True, False], ids=["newer start", "same start"])
def test_two_who_write_one_again_do_not_remove_each_others_files(
    tmp_path: Path, place: str, *, newer: bool
) -> None:
    """One is paused at each of its reads, while the other sweeps and publishes its shards."""
    bench, at, ended = two_ranks(tmp_path, place=place), 0, False
    pristine = bench.folder.parent
    while not ended:
        at += 1
        copy = shutil.copytree(pristine, str(tmp_path / str(at)))
        work = CheckpointDirectory(f"file://{copy}" if place == "store" else copy)
        bench.folder = Path(copy) / G.name

        def other(path: str = work.path) -> None:
            directory = CheckpointDirectory(path)
            term = directory.claim(bench.run_id, "other", 0, force=True) if newer else 1
            remove_replaced(directory, term=term)
            bench.replace(directory, term)

        paused = Interrupted(at, other)
        with contextlib.suppress(AutockptError, OSError):
            commit, records = write_weights(work, G, paused, term=1)
            replace_commit(work, commit, records, term=1)
        remove_replaced(work, term=1)
        ended = paused.reads < at
        assert holds_weights_only(bench.commit.records)
        assert verify_generation(work.path, G.name).ok, at
    assert at > 4


@places
@pytest.mark.parametrize("look", ["before", "behind"])
def test_a_claim_in_the_last_moment_keeps_the_old_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, look: str
) -> None:
    """A newer start claims the directory directly before the new COMMIT appears, or behind it."""
    bench = Bench(tmp_path, place=place)

    def claim() -> None:
        directory = CheckpointDirectory(bench.directory.path)
        if directory.holds(1):
            directory.claim(bench.run_id, "other", 0, force=True)

    commit, records = write_weights(bench.directory, G, Unlimited(), term=1)
    replacing(monkeypatch, **{look: claim})
    with pytest.raises(GuardError, match=str(bench.folder.parent)):
        replace_commit(bench.directory, commit, records, term=1)
    assert verify_generation(bench.directory.path, G.name).ok
    remove_replaced(bench.directory, term=2)
    assert bench.is_as_it_was(commit)
    assert verify_generation(bench.directory.path, G.name).ok


def test_weights_of_ranks_that_differ_are_refused_like_the_whole(tmp_path: Path) -> None:
    """Not read as the first rank's."""
    bench = two_ranks(tmp_path, differ=True)
    for _ in range(2):
        with pytest.raises(ConfigError, match="rank 1 does not hold the same model"):
            bench.tree()
        bench.replace(bench.directory, 1)


def test_a_sweep_leaves_the_old_shards_of_a_pinned_one(tmp_path: Path) -> None:
    """A keeper was killed behind its new COMMIT, before it looked for a pin."""
    bench = Bench(tmp_path)
    commit, records = write_weights(bench.directory, G, Unlimited(), term=1)
    whole = {str(commit.records[0][key]) for key in ("file", "index")}
    (bench.folder / "PINNED").write_text("paper\n")
    (bench.folder / "COMMIT").write_text(to_json(replace(commit, records=records).sealed()))
    remove_replaced(bench.directory, term=2)
    assert leftovers(bench.directory.path) == []
    assert whole <= set(os.listdir(bench.folder))


def test_new_shards_that_are_gone_do_not_count(tmp_path: Path) -> None:
    """A start has swept them as left-overs."""
    bench = Bench(tmp_path)
    commit, records = write_weights(bench.directory, G, Unlimited(), term=1)
    remove_replaced(bench.directory, term=2)
    with pytest.raises(StorageError, match="was changed meanwhile"):
        replace_commit(bench.directory, commit, records, term=1)
    assert bench.tree()["optimizer"]["state"]


def test_who_reads_meanwhile_reads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` beside a run: files of the COMMIT that it has read go, and nothing is damaged."""
    bench = Bench(tmp_path)
    opened, dropped = catalogue.open_shard, []

    def late(folder: str, record: Any, commit: CommitFile) -> Any:
        if not dropped:
            dropped.append(bench.drop())
        return opened(folder, record, commit)

    monkeypatch.setattr(catalogue, "open_shard", late)
    result = verify_generation(bench.directory.path, G.name)
    assert (result.ok, result.damaged, result.problems) == (True, False, ())
    assert len(dropped) == 1


KILLED = """
import json, os, shutil, signal, sys
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.rewriting.commits import replace_commit
from autockpt.executors.storage.rewriting.weights_only import write_weights
from autockpt.executors.throttle.rate_limit import Unlimited
from autockpt.values.generation import Generation

pristine, work, every = sys.argv[1:]
names = ("open", "pwrite", "write", "fsync", "rename", "unlink", "ftruncate", "close", "listdir")

def play(kill_at):
    directory, calls = CheckpointDirectory(work), 0
    directory.open()
    def counted(real):
        def call(*a, **k):
            nonlocal calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*a, **k)
        return call
    for name in names:
        setattr(os, name, counted(getattr(os, name)))
    commit, records = write_weights(directory, Generation(term=1, step=4), Unlimited(), term=1)
    replace_commit(directory, commit, records, term=1)

ended, kill_at = False, 0
while not ended:
    kill_at += int(every)
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(pristine, work)
    pid = os.fork()
    if not pid:
        play(kill_at)
        os._exit(0)
    ended = os.waitpid(pid, 0)[1] == 0
    print(kill_at, ended, flush=True)
    if not sys.stdin.readline():
        break
"""


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_kill_at_any_instant_loses_nothing(tmp_path: Path, every: int) -> None:
    """SIGKILL before each call on files: whole or weights, and it reads back; leftovers go."""
    bench = Bench(tmp_path)
    pristine, work = bench.directory.path, tmp_path / "work"
    whole = bench.tree()
    folder, seen = work / G.name, set()
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, pristine, work, str(every)], text=True, cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert killed.stdin is not None
    assert killed.stdout is not None
    bench.folder, ended = folder, False
    try:
        while not ended:
            kill_at, said = killed.stdout.readline().split()
            ended = said == "True"
            between = is_undecided(bench.commit)
            weights = holds_weights_only(bench.commit.records)
            tree = bench.tree()
            assert weights or equal(tree["optimizer"], whole["optimizer"]), kill_at
            assert equal(tree["model"], whole["model"]), kill_at
            assert verify_generation(str(work), G.name).ok, kill_at
            remove_replaced(CheckpointDirectory(str(work)), term=2)
            assert len(list(folder.glob("shard-*"))) == 1, kill_at
            now = whole if between else tree
            assert bench.tree().keys() == now.keys(), kill_at
            seen.add(weights)
            killed.stdin.write("\n")
            killed.stdin.flush()
    finally:
        killed.kill()
        killed.communicate()
    assert seen == {True, False}
    assert int(kill_at) > 20


@places
@pytest.mark.parametrize("start", [True, False], ids=["start", "gc"])
def test_gc_or_a_start_removes_what_a_killed_keeper_left(
    tmp_path: Path, place: str, *, start: bool
) -> None:
    """Beside a COMMIT only shards that it does not name."""
    bench = Bench(tmp_path, place=place)
    _, (record,) = write_weights(bench.directory, G, Unlimited(), term=1)
    bench.directory.heartbeat(1)
    found = [one for one in leftovers(bench.directory.path) if one.kind == "replaced"]
    assert {os.path.basename(one.path) for one in found} == {record["index"], record["file"]}
    if start:
        remove_replaced(bench.directory, term=2)
    else:
        for one in found:
            remove(one)
    assert len(list(bench.folder.glob("shard-*"))) == 1
    assert bench.tree()["optimizer"]["state"]
    assert not [one for one in leftovers(bench.directory.path) if G.name in one.path]


def test_the_new_record_keeps_reported_values(tmp_path: Path) -> None:
    """`keep.best` compares them."""
    bench = Bench(tmp_path)
    commit = bench.commit
    (record,) = commit.records
    valued = replace(commit, records=({**record, "metrics": {"loss": 0.5}},)).sealed()
    (bench.folder / "COMMIT").write_text(to_json(valued))
    assert bench.drop().records[0]["metrics"] == {"loss": 0.5}


def test_a_copy_elsewhere_stays_whole_and_comes_back_whole(tmp_path: Path) -> None:
    """A store that has the checkpoint whole; the directory has dropped its optimizer state."""
    bench = Bench(tmp_path)
    copies = RemoteCopies(Objects("memory:///copies", store=MemoryStore()))
    assert copies.push(bench.directory, G).bytes
    bench.drop()
    assert not copies.push(bench.directory, G).bytes
    (copy,) = copies.commits()
    assert not holds_weights_only(copy.records)
    bench.directory.release(1)
    _, told = copies.pull(bench.directory.path, G)
    assert [line for line in told if "damaged" in line] == []
    assert bench.tree()["optimizer"]["state"]


def test_a_copy_of_weights_is_not_offered_to_a_restart(tmp_path: Path) -> None:
    """By name it comes back, for an evaluation."""
    bench = Bench(tmp_path)
    bench.drop()
    copies = RemoteCopies(Objects("memory:///copies", store=MemoryStore()))
    copies.push(bench.directory, G)
    assert copies.eligible(copies.commits()) == []
    assert copies.missing(str(tmp_path / "empty")) is None
    bench.folder = tmp_path / "back" / G.name
    copies.pull(str(tmp_path / "back"), G)
    assert bench.tree()["model"]
    assert holds_weights_only(bench.commit.records)
