"""The keeper's disk thread: instructions in order, fenced, and alive for ever."""

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.keeper import storage_worker
from autockpt.executors.keeper.storage_worker import (
    SCRUB_BYTES_PER_S,
    SCRUB_HURRIED_BYTES_PER_S,
    DiskWorker,
)
from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol import messages as p
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import read_commit
from autockpt.executors.storage.rewriting import commits, weights_only
from autockpt.executors.storage.rewriting.commits import is_undecided
from autockpt.executors.storage.rewriting.weights_only import write_weights
from autockpt.executors.storage.shard_file import ImageReader
from autockpt.executors.throttle.rate_limit import RateLimiter, Unlimited
from autockpt.values.errors import GuardError, StorageError
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import CHUNK, PATIENCE_S, commit_images, commit_state
from tests.unit.executors.states import trained

WHO = p.Incarnation(launch_id="launch", restart_round=0)


def g(step: int) -> Generation:
    """One generation of term 1."""
    return Generation(term=1, step=step)


class Bench:
    """A worker on a directory, and what it answered."""

    def __init__(self, path: Path) -> None:
        self.directory = CheckpointDirectory(str(path))
        self.run_id = self.directory.open()
        self.answers: list[Any] = []
        self.deleted: list[Generation] = []
        self._answered = threading.Semaphore(0)
        self.worker = DiskWorker(
            self.directory, self.run_id, self._post, self.answers.append,
            lambda generation, step, freed: self.deleted.append(generation),
        )  # fmt: skip

    def _post(self, work: Callable[[], None]) -> None:
        work()
        self._answered.release()

    def order(self, instruction: Any) -> Any:
        """Gives an instruction and returns its answer."""
        self.worker.execute(instruction)
        return self.answered()

    def answered(self) -> Any:
        """The oldest answer that was not looked at."""
        assert self._answered.acquire(timeout=PATIENCE_S)
        return self.answers.pop(0)

    def done(self, *instructions: Any) -> None:
        """Gives instructions without an answer and waits for their end."""
        for instruction in instructions:
            self.worker.execute(instruction)
        ended = threading.Event()
        self.worker.submit(ended.set)
        assert ended.wait(PATIENCE_S)

    def claim(self, *, term: int | None = None) -> Any:
        """Asks for the directory."""
        return self.order(p.ClaimTerm(incarnation=WHO, term=term))

    def commit(self, *seqs: int) -> None:
        """Committed and verified generations."""
        for step in seqs:
            image = Arena.anonymous(CHUNK + 4096).view
            commit_images(self.directory, self.run_id, g(step), [image], step=step)
            self.directory.mark(g(step), "VERIFIED")

    def listed(self) -> list[Generation]:
        return [entry.generation for entry in self.directory.catalogue(self.run_id)]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A worker on an empty directory, of a disk with room on each machine."""
    for module in (storage_worker, weights_only):
        monkeypatch.setattr(module, "is_tight", lambda path: False)
    return Bench(tmp_path / "checkpoints")


def test_a_claim_comes_with_everything_that_was_decided_before(bench: Bench) -> None:
    """Catalogue and lineage, read after the claim stood."""
    assert bench.claim().term == 1
    bench.commit(1)
    bench.done(p.MarkEverCommitted(term=1))
    assert isinstance(
        bench.order(p.WriteDecision(term=1, attempt=1, generation=None, reason="new")),
        p.DecisionWritten,
    )
    answer = bench.claim()
    assert answer.term == 2
    assert [entry.generation for entry in answer.committed] == [g(1)]
    assert answer.committed[0].verified
    assert [(one.term, one.parent) for one in answer.parents] == [(1, None)]
    assert answer.ever_committed


def test_a_decision_comes_with_a_mark_that_was_left_since_the_claim(bench: Bench) -> None:
    """The keeper of the term before was still reading the generation back."""
    bench.claim()
    bench.commit(1)
    assert bench.claim().committed[0].health == "good"
    order = p.WriteDecision(term=2, attempt=1, generation=g(1), reason="newest")
    assert not bench.order(order).suspect
    bench.directory.mark(g(1), "SUSPECT")
    assert bench.order(order).suspect


def test_a_replaced_term_is_refused_again(bench: Bench) -> None:
    """A running trainer that comes back names the term it trains in."""
    assert bench.claim().term == 1
    assert bench.claim(term=1).term == 1
    assert bench.claim().term == 2
    refused = bench.claim(term=1)
    assert isinstance(refused, p.TermRefused)
    assert "term 1 is fenced by a newer incarnation" in refused.reason


AGAIN = p.Incarnation(launch_id="launch", restart_round=1)


def test_a_claim_that_the_storage_has_not_taken_is_withdrawn_for_good(bench: Bench) -> None:
    """It waited behind a job that hangs; when that ends nothing is claimed, and nothing said."""
    assert bench.claim().term == 1
    hangs = threading.Event()
    bench.worker.submit(lambda: hangs.wait(PATIENCE_S) and None)
    bench.worker.execute(p.ClaimTerm(incarnation=AGAIN, term=None))
    assert bench.worker.withdraw_claims(1)
    hangs.set()
    bench.done()
    assert not bench.answers
    assert bench.directory.holds(1)
    assert bench.order(p.ClaimTerm(incarnation=AGAIN, term=None)).term == 2


def test_a_claim_that_is_being_linked_is_not_withdrawn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may stand, whatever the answer will be."""
    assert bench.claim().term == 1
    linking, hangs = threading.Event(), threading.Event()
    link = os.link

    def slow_link(source: str, target: str) -> None:
        linking.set()
        assert hangs.wait(PATIENCE_S)
        link(source, target)

    monkeypatch.setattr(os, "link", slow_link)
    bench.worker.execute(p.ClaimTerm(incarnation=AGAIN, term=None))
    assert linking.wait(PATIENCE_S)
    assert not bench.worker.withdraw_claims(1)
    hangs.set()
    assert bench.answered().term == 2
    assert not bench.worker.withdraw_claims(1), "a claim above that term stands"


def test_a_claim_whose_file_cannot_be_made_yet_is_withdrawn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage that answers reads alone hangs before the claim appears."""
    assert bench.claim().term == 1
    syncing, hangs = threading.Event(), threading.Event()
    sync = os.fsync

    def slow_sync(descriptor: int) -> None:
        syncing.set()
        assert hangs.wait(PATIENCE_S)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_sync)
    bench.worker.execute(p.ClaimTerm(incarnation=AGAIN, term=None))
    assert syncing.wait(PATIENCE_S)
    assert bench.worker.withdraw_claims(1)
    hangs.set()
    bench.done()
    assert not bench.answers
    assert bench.directory.holds(1)


def test_an_older_term_neither_commits_nor_decides_nor_deletes(bench: Bench) -> None:
    """Each answer says that it was the fence; nothing changed on disk."""
    bench.claim()
    bench.commit(1, 2, 3)
    bench.claim()
    failed = bench.order(p.WriteDecision(term=1, attempt=1, generation=None, reason="late"))
    assert (type(failed), failed.fenced) == (p.DecisionFailed, True)
    bench.directory.create_generation(g(4))
    failed = bench.order(
        p.WriteCommit(
            generation=g(4), step=4, world_size=1, parent=None, records=({},), health="good",
            layout_digests=("",),
        )
    )  # fmt: skip
    assert (type(failed), failed.fenced) == (p.CommitFailed, True)
    bench.done(p.DeleteGenerations(term=1, generations=(g(1), g(2))))
    assert bench.listed() == [g(1), g(2), g(3)]
    assert bench.deleted == []
    bench.done(p.DeleteGenerations(term=2, generations=(g(1), g(2), g(9))))
    assert bench.listed() == [g(3)]
    assert bench.deleted == [g(2), g(1)]


def test_the_guard_stands_before_every_delete(bench: Bench) -> None:
    """A confused plan cannot remove the last good checkpoint; the keeper is told."""
    bench.claim()
    bench.commit(1, 2)
    answer = bench.order(p.DeleteGenerations(term=1, generations=(g(1), g(2))))
    assert isinstance(answer, GuardError)
    assert bench.listed() == [g(1), g(2)]


def trained_commits(bench: Bench, *steps: int) -> None:
    """Committed and verified generations with optimizer state."""
    model, optimizer = trained()
    state = LiveState({"model": model}, {"optimizer": optimizer}, {})
    for step in steps:
        commit_state(bench.directory, bench.run_id, g(step), state, step=step)
        bench.directory.mark(g(step), "VERIFIED")


def weights(bench: Bench) -> list[int]:
    """Steps whose optimizer state is dropped."""
    return [e.step for e in bench.directory.catalogue(bench.run_id) if e.weights_only]


def test_optimizer_state_goes_beside_other_work(bench: Bench) -> None:
    """The answer has the new records; a second order finds the work done."""
    bench.claim()
    trained_commits(bench, 1, 2, 3)
    order = p.DropOptimizerState(term=1, generation=g(1))
    answer = bench.order(order)
    assert (answer.generation, answer.reason) == (g(1), "")
    assert answer.records == bench.directory.catalogue(bench.run_id)[0].records
    assert bench.order(order) == answer
    assert weights(bench) == [1]


@pytest.mark.parametrize("why", ["too new", "pinned", "fenced", "deleted"])
def test_optimizer_state_stays_where_the_guard_says_so(bench: Bench, why: str) -> None:
    """A confused plan, a person, a newer start: the checkpoint stays whole, with a reason."""
    bench.claim()
    trained_commits(bench, 1, 2, 3)
    generation, said = g(1), ""
    if why == "too new":
        generation, said = g(2), "1 verified ones are newer, expected 2"
    elif why == "pinned":
        bench.directory.pin(g(1), "paper")
        said = "is pinned as 'paper' and stays whole"
    elif why == "fenced":
        bench.claim()
        said = "term 1 is fenced by a newer incarnation"
    else:
        bench.directory.delete(g(1))
        said = "has no COMMIT of this run"
    answer = bench.order(p.DropOptimizerState(term=1, generation=generation))
    assert answer.records == ()
    assert said in answer.reason
    assert weights(bench) == []
    assert not list(Path(bench.directory.path).glob("ckpt-*/*-w*.*"))


def test_an_order_given_twice_has_one_answer(bench: Bench) -> None:
    """Trainers began again in a living keeper; a sweep for them leaves files in flight."""
    bench.claim()
    trained_commits(bench, 1, 2, 3)
    order = p.DropOptimizerState(term=1, generation=g(1))
    held = threading.Event()
    bench.worker._rewrites.put(lambda: bool(held.wait(PATIENCE_S)) or None)
    for _ in range(2):
        bench.worker.execute(order)
    held.set()
    bench.worker._rewrites.join()
    bench.done()
    bench.done()
    dropped = [a for a in bench.answers if isinstance(a, p.OptimizerStateDropped)]
    assert [(one.term, one.reason) for one in dropped] == [(1, "")]


def test_optimizer_state_waits_for_room(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tight disk is for saves; nothing is written."""
    monkeypatch.setattr(weights_only, "is_tight", lambda path: True)
    bench.claim()
    trained_commits(bench, 1, 2, 3)
    answer = bench.order(p.DropOptimizerState(term=1, generation=g(1)))
    assert (answer.later, answer.records) == (True, ())
    assert "expected" in answer.reason
    assert weights(bench) == []


def test_a_replacement_that_a_full_disk_has_cut_off_is_ended_before_it_is_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second replacement and the one back fail; the disk is tight, and nothing is written."""
    bench.claim()
    trained_commits(bench, 1, 2, 3)
    order, real, calls = p.DropOptimizerState(term=1, generation=g(1)), commits._swap, []

    def swap(*args: Any, **how: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(commits, "_swap", swap)
        assert "No space left" in bench.order(order).reason
    folder = bench.directory.generation_path(g(1))
    assert is_undecided(read_commit(f"{folder}/COMMIT"))
    monkeypatch.setattr(weights_only, "is_tight", lambda path: True)
    answer = bench.order(order)
    assert (answer.reason, answer.later) == ("", False)
    commit = read_commit(f"{folder}/COMMIT")
    assert not is_undecided(commit)
    assert answer.records == commit.records
    assert len(list(Path(folder).glob("shard-*"))) == 1


def test_no_difference_is_committed_to_weights(bench: Bench) -> None:
    """What it is a difference to has lost bytes that it needs."""
    bench.claim()
    trained_commits(bench, 1, 2, 3)
    bench.order(p.DropOptimizerState(term=1, generation=g(1)))
    bench.directory.create_generation(g(4))
    order = p.WriteCommit(
        generation=g(4), step=4, world_size=1, parent=None, records=({"base": g(1).name},),
        health="good", layout_digests=("",),
    )  # fmt: skip
    failed = bench.order(order)
    assert "is gone, and a shard is a difference to it" in failed.reason


def test_a_start_removes_what_a_killed_keeper_left_of_new_shards(bench: Bench) -> None:
    """After the decision, for which a restart waits."""
    bench.claim()
    trained_commits(bench, 1)
    write_weights(bench.directory, g(1), Unlimited(), term=1)
    bench.claim()
    bench.order(p.WriteDecision(term=2, attempt=1, generation=g(1), reason="newest"))
    bench.done()
    bench.done()
    assert not list(Path(bench.directory.path).glob("ckpt-*/*-w*.*"))
    assert weights(bench) == []


def test_trash_takes_what_has_no_commit_only(bench: Bench) -> None:
    """No answer either way."""
    bench.claim()
    bench.commit(1)
    bench.directory.create_generation(g(2))
    bench.done(
        p.TrashGeneration(generation=g(1), reason="aborted"),
        p.TrashGeneration(generation=g(2), reason="aborted"),
    )
    assert bench.listed() == [g(1)]
    assert not Path(bench.directory.generation_path(g(2))).exists()


def test_what_earlier_incarnations_left_unfinished_goes_once_a_newer_one_has_decided(
    bench: Bench,
) -> None:
    """Their keepers died in a save: no commit can come.  What has a COMMIT stays, damaged or not,
    and what a person set aside; so does what the newest incarnation writes."""
    bench.claim()
    bench.commit(1, 2)
    (Path(bench.directory.generation_path(g(2))) / "COMMIT").write_bytes(b"damaged")
    for step in (3, 4, 5):
        folder = Path(bench.directory.create_generation(g(step)))
        (folder / "shard-00000-a1.safetensors").write_bytes(bytes(4096))
    bench.directory.mark(g(4), "QUARANTINE")
    (Path(bench.directory.generation_path(g(5))) / "notes.txt").write_text("precious")
    bench.claim()
    ours = Generation(term=2, step=4)
    bench.directory.create_generation(ours)
    bench.order(p.WriteDecision(term=1, attempt=2, generation=g(1), reason="late"))
    bench.done()
    assert Path(bench.directory.generation_path(g(3))).exists()
    bench.order(p.WriteDecision(term=2, attempt=1, generation=g(1), reason="newest"))
    bench.done()
    path = Path(bench.directory.path)
    assert {file.name for file in path.glob("ckpt-*")} == {
        one.name for one in (g(1), g(2), g(4), g(5), ours)
    }
    assert (path / g(4).name / "shard-00000-a1.safetensors").exists()
    assert [file.name for file in (path / g(5).name).iterdir()] == ["notes.txt"]
    assert list((path / "trash").iterdir()) == []


def test_a_leftover_that_cannot_be_removed_ends_nothing(bench: Bench) -> None:
    """Claims and decisions go on; it goes once it can."""
    bench.claim()
    bench.directory.create_generation(g(1))
    trash, path = Path(bench.directory.path) / "trash", Path(bench.directory.generation_path(g(1)))
    trash.rmdir()
    trash.write_bytes(b"in the way")
    bench.claim()
    order = p.WriteDecision(term=2, attempt=1, generation=None, reason="new")
    assert isinstance(bench.order(order), p.DecisionWritten)
    bench.done()
    assert path.exists()
    trash.unlink()
    trash.mkdir()
    bench.claim()
    order = p.WriteDecision(term=3, attempt=1, generation=None, reason="new")
    assert isinstance(bench.order(order), p.DecisionWritten)
    bench.done()
    assert not path.exists()
    assert bench.answers == []


def test_verification_marks_what_it_found(bench: Bench) -> None:
    """VERIFIED, or CORRUPT with the first problems."""
    bench.claim()
    bench.commit(1, 2)
    shard = Path(bench.directory.generation_path(g(2))) / "shard-00000-a1.safetensors"
    data = bytearray(shard.read_bytes())
    data[5] ^= 1
    shard.write_bytes(data)
    assert bench.order(p.VerifyGeneration(generation=g(1))).ok
    bad = bench.order(p.VerifyGeneration(generation=g(2)))
    assert not bad.ok
    assert "chunk 0" in bad.detail
    first, second = bench.directory.catalogue(bench.run_id)
    assert (first.verified, first.corrupt, second.corrupt) == (True, False, True)


def test_of_several_that_wait_only_the_newest_is_read_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that saves faster than it can read back must not fall behind without end."""
    bench.claim()
    bench.commit(1, 2, 3, 4)
    real, reading, go_on = storage_worker.verify_generation, threading.Event(), threading.Event()

    def held(*args: Any, **more: Any) -> Any:
        reading.set()
        assert go_on.wait(PATIENCE_S)
        return real(*args, **more)

    monkeypatch.setattr(storage_worker, "verify_generation", held)
    bench.worker.execute(p.VerifyGeneration(generation=g(1)))
    assert reading.wait(PATIENCE_S)
    for step in (2, 4, 3):
        bench.worker.execute(p.VerifyGeneration(generation=g(step)))
    go_on.set()
    assert [bench.answered().generation, bench.answered().generation] == [g(1), g(4)]
    bench.worker.execute(p.VerifyGeneration(generation=g(2)))
    assert bench.answered().generation == g(2)


def test_a_scrub_hurries_once_enough_generations_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is a state on disk; the next one is read slowly again."""
    bench.claim()
    bench.commit(1, 2, 3, 4)
    paces, reading, go_on = [], threading.Event(), threading.Event()
    real = storage_worker.verify_generation

    def held(*args: Any, gate: RateLimiter) -> Any:
        paces.append(gate.bytes_per_s)
        reading.set()
        assert go_on.wait(PATIENCE_S)
        paces.append(gate.bytes_per_s)
        return real(*args, gate=gate)

    monkeypatch.setattr(storage_worker, "verify_generation", held)
    monkeypatch.setattr(storage_worker, "is_tight", lambda path: False)
    slow, fast = SCRUB_BYTES_PER_S, SCRUB_HURRIED_BYTES_PER_S
    for step in (1, 2, 3):
        bench.worker.execute(p.VerifyGeneration(generation=g(step)))
        assert reading.wait(PATIENCE_S)
    assert bench.worker.scrub_gate.bytes_per_s == slow
    bench.worker.execute(p.VerifyGeneration(generation=g(4)))
    go_on.set()
    assert [bench.answered().generation, bench.answered().generation] == [g(1), g(4)]
    assert paces == [slow, fast, slow, slow]


def test_a_scrub_hurries_on_a_disk_that_is_nearly_full(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what it verifies lets older checkpoints go."""
    bench.claim()
    bench.commit(1)
    monkeypatch.setattr(storage_worker, "is_tight", lambda path: True)
    assert bench.order(p.VerifyGeneration(generation=g(1))).generation == g(1)
    assert bench.worker.scrub_gate.bytes_per_s == SCRUB_HURRIED_BYTES_PER_S


def test_storage_that_does_not_answer_condemns_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper degrades; the generation keeps its state."""
    bench.claim()
    bench.commit(1)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.preadv", fail)
        answer = bench.order(p.VerifyGeneration(generation=g(1)))
    assert isinstance(answer, StorageError)
    (entry,) = bench.directory.catalogue(bench.run_id)
    assert not entry.corrupt


@pytest.mark.parametrize("marked", [True, False])
def test_nan_is_told_and_marked_before_the_generation_counts_as_verified(
    bench: Bench, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where SUSPECT cannot be written VERIFIED is not either: the next keeper reads it again."""
    bench.claim()
    table = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    header = json.dumps(table).encode().ljust(CHUNK - 8)
    arena = Arena.anonymous(CHUNK + 4096)
    data = (CHUNK - 8).to_bytes(8, "little") + header + bytes(4) + b"\0\0\xc0\x7f"
    arena.view[: len(data)] = data
    commit_images(bench.directory, bench.run_id, g(1), [arena.view[: len(data)]])
    mark = bench.directory.mark
    if not marked:
        monkeypatch.setattr(
            bench.directory, "mark", lambda g, name: name != "SUSPECT" and mark(g, name)
        )
    answer = bench.order(p.VerifyGeneration(generation=g(1)))
    if not marked:
        assert isinstance(answer, StorageError)
        assert "cannot be marked SUSPECT" in str(answer)
        answer = bench.answered()
    assert (answer.ok, answer.health, "NaN in w" in answer.detail) == (True, "suspect", True)
    (entry,) = bench.directory.catalogue(bench.run_id)
    assert (entry.verified, entry.health != "good", entry.corrupt) == (marked, marked, False)


def test_a_job_that_fails_unexpectedly_does_not_end_the_thread(bench: Bench) -> None:
    """Every later commit runs on it."""

    def explode() -> None:
        raise RuntimeError("a bug of ours")

    bench.worker.submit(explode)
    told, claimed = bench.claim(), bench.answered()
    assert isinstance(told, RuntimeError)
    assert claimed.term == 1


def test_the_scrub_is_paced() -> None:
    """Slower than any disk that a checkpoint is worth writing to at full speed."""
    assert 5e7 <= SCRUB_BYTES_PER_S < SCRUB_HURRIED_BYTES_PER_S <= 1e9


def test_what_was_read_back_long_ago_is_read_again_when_nobody_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest ago first; rot since then is found and told."""
    monkeypatch.setattr(storage_worker, "AGAIN_CHECK_S", 0.01)
    bench.claim()
    bench.commit(1, 2)
    for step in (1, 2):
        assert bench.order(p.VerifyGeneration(generation=g(step))).ok
    age(bench, 1)
    assert bench.answered() == p.GenerationVerified(generation=g(1), ok=True, detail="")
    flip(Path(bench.directory.generation_path(g(2))) / "shard-00000-a1.safetensors")
    age(bench, 2)
    again = bench.answered()
    assert (again.generation, again.ok) == (g(2), False)
    assert "chunk 0" in again.detail


@pytest.mark.parametrize("trouble", ["unreadable", "damaged", "marked"])
def test_one_generation_that_stays_bad_keeps_no_other_from_being_read_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Each has its turn, the longest ago first; what is known to be damaged has none."""
    real = ImageReader.read_at

    def failing(reader: ImageReader, offset: int, into: memoryview) -> None:
        if g(1).name in reader.path:
            raise StorageError(f"{reader.path}: cannot read: Input/output error")
        real(reader, offset, into)

    bench.claim()
    bench.commit(1, 2, 3)
    shard = Path(bench.directory.generation_path(g(1))) / "shard-00000-a1.safetensors"
    if trouble == "unreadable":
        monkeypatch.setattr(ImageReader, "read_at", failing)
    else:
        flip(shard)
    if trouble == "marked":
        bench.directory.mark(g(1), "CORRUPT")
    age(bench, 1, 2, 3)
    monkeypatch.setattr(storage_worker, "AGAIN_CHECK_S", 0.01)
    told = [bench.order(p.VerifyGeneration(generation=g(3)))]  # from now on it reads again
    told += [bench.answered() for _ in range(1 if trouble == "marked" else 2)]
    wrong = {
        "unreadable": [StorageError], "damaged": [p.GenerationVerified], "marked": [],
    }[trouble]  # fmt: skip
    assert [type(one) for one in told] == [p.GenerationVerified, *wrong, p.GenerationVerified]
    assert [one.generation for one in (told[0], told[-1])] == [g(3), g(2)]
    assert told[-1].ok
    assert bench.worker._longest_unread() is None


def age(bench: Bench, *seqs: int) -> None:
    """They were read back in 1970, the first one first."""
    for step in seqs:
        mark = Path(bench.directory.generation_path(g(step))) / "VERIFIED"
        os.utime(mark, (step, step))


def flip(path: Path) -> None:
    """One bit of the first chunk."""
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


def test_the_heart_beats_beside_a_job_that_takes_long(bench: Bench) -> None:
    """Else a launch on another machine takes the run over during a long deletion."""
    bench.claim()
    path = Path(bench.directory.path, "terms", "heartbeat")
    release, began = threading.Event(), threading.Event()

    def delete() -> None:
        began.set()
        release.wait(60)

    bench.worker.submit(delete)
    assert began.wait(60)
    before = path.read_text() if path.exists() else ""
    try:
        bench.worker.beat(1)
        deadline = time.monotonic() + 60
        while (path.read_text() if path.exists() else "") == before:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        release.set()
