"""What the protocol asserts on a checkpoint directory, wherever that stands."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol.messages import holds_weights_only
from autockpt.executors.protocol.selection import newest_chain, on_lineage, parents_of
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.catalogue import verify_generation
from autockpt.executors.storage.directory import claims as claims_module
from autockpt.executors.storage.directory import commits as commits_module
from autockpt.executors.storage.directory import directory as directory_module
from autockpt.executors.storage.directory import lease as lease_module
from autockpt.executors.storage.directory import records as records_module
from autockpt.executors.storage.directory import removal as removal_module
from autockpt.executors.storage.directory.claims import TermFile
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import read_commit
from autockpt.executors.storage.places.choose import place_of
from autockpt.executors.storage.places.images import create_image, open_image
from autockpt.executors.storage.rewriting import commits as rewriting_module
from autockpt.executors.storage.rewriting.commits import remove_replaced, replace_commit
from autockpt.executors.storage.rewriting.weights_only import write_weights
from autockpt.executors.throttle.rate_limit import Unlimited
from autockpt.values.errors import (
    ConfigError,
    CorruptCheckpointError,
    DirectoryBusyError,
    GuardError,
    StorageError,
)
from autockpt.values.generation import Generation
from autockpt.values.record import from_json
from tests.contracts.directory_contract import in_threads
from tests.unit.executors.checkpoints import commit_state
from tests.unit.executors.states import trained

G1, G2 = Generation(term=1, step=10), Generation(term=1, step=20)
PAGES = 3
SHARD = "shard-00000-a1.safetensors"
MOST = 200
"""More operations than anything here makes."""


class Died(BaseException):
    """The process ends here."""


class Mortal:
    """The storage of a process that dies in front of its nth change."""

    CHANGES = frozenset({"publish", "replace", "write", "write_new", "move", "remove", "discard"})

    def __init__(self, place: Any, after: int) -> None:
        self._place, self._left = place, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._place, name)
        if name not in self.CHANGES:
            return found

        def change(*args: Any, **kwargs: Any) -> Any:
            if not self._left:
                raise Died("here")
            self._left -= 1
            return found(*args, **kwargs)

        return change


def put_under(patch: pytest.MonkeyPatch, place: Callable[[str], Any]) -> None:
    """Let every part of a checkpoint directory use `place`."""
    for module in (directory_module, records_module, removal_module):
        patch.setattr(module, "place_of", place)


class PlaceContract:
    """Subclass and set the fixture `path`: a directory, or the URL of one, that is new."""

    @pytest.fixture
    def path(self) -> str:
        """Where the checkpoints go."""
        raise NotImplementedError

    @pytest.fixture
    def patch(self) -> Iterator[pytest.MonkeyPatch]:
        """Beside pytest's, which holds the account of the store."""
        with pytest.MonkeyPatch.context() as patch:
            yield patch

    def opened(self, path: str) -> tuple[CheckpointDirectory, str]:
        """(directory, run id), term 1 claimed."""
        directory = CheckpointDirectory(path)
        run_id = directory.open()
        assert directory.claim(run_id, "launch", 0, force=False) == 1
        return directory, run_id

    def shard(self, directory: CheckpointDirectory, generation: Generation) -> tuple[Any, ...]:
        """One whole shard and its index, and what a COMMIT says of them."""
        folder = directory.create_generation(generation)
        write_shard(f"{folder}/{SHARD}", generation.step).finish(PAGES * 4096)
        directory.write_index(f"{folder}/idx-00000-a1.json", b"{}")
        return ({"rank": 0, "file": SHARD, "index": "idx-00000-a1.json", "bytes": PAGES * 4096,
                 "root": "ab"},)  # fmt: skip

    def commit(self, directory: CheckpointDirectory, run_id: str, generation: Generation) -> None:
        """A whole generation."""
        records = self.shard(directory, generation)
        self.put(directory, run_id, generation, records)

    def put(
        self, directory: CheckpointDirectory, run_id: str, generation: Generation, records: Any
    ) -> None:
        """Its COMMIT alone."""
        directory.write_commit(
            run_id, generation, step=generation.step, world_size=1, parent=None,
            records=records, health="good",
        )  # fmt: skip

    def names(self, directory: CheckpointDirectory, generation: Generation) -> set[str]:
        """What stands in its folder."""
        folder = directory.generation_path(generation)
        return set(place_of(folder).names(folder))

    def listed(self, directory: CheckpointDirectory, run_id: str) -> list[Generation]:
        """Generations with a valid COMMIT."""
        return [entry.generation for entry in directory.catalogue(run_id)]

    # ----------------------------------------------------------------- identity and lease

    def test_openers_at_the_same_time_agree_on_the_run(self, path: str) -> None:
        """Eight threads, one RUN; later ones read it."""
        ids = set(in_threads(8, lambda i: CheckpointDirectory(path).open()))
        assert len(ids) == 1
        assert CheckpointDirectory(path).open() in ids

    def test_no_term_has_two_owners(self, path: str) -> None:
        """Eight claims at once: eight terms, and the newest names its own owner."""
        self.opened(path)
        terms = in_threads(
            8, lambda i: CheckpointDirectory(path).claim("run", "launch", i, force=False)
        )
        assert sorted(terms) == list(range(2, 10))
        holder = CheckpointDirectory(path).highest_term()
        assert holder is not None
        assert terms[holder.restart_round] == 9

    @pytest.mark.parametrize("beats", [True, False])
    def test_a_holder_elsewhere_lives_while_its_heart_beats(
        self, path: str, patch: pytest.MonkeyPatch, beats: bool
    ) -> None:
        """By the clock of the one who waits: a clock that is off elsewhere changes nothing."""
        directory, run_id = self.opened(path)
        clock = [0.0]

        def sleep(seconds: float) -> None:
            clock[0] += seconds
            if beats:
                directory.heartbeat(1)

        patch.setattr(claims_module, "boot_id", lambda: "another machine")
        patch.setattr(lease_module.time, "monotonic", lambda: clock[0])
        patch.setattr(lease_module.time, "sleep", sleep)
        patch.setattr(lease_module.time, "time", lambda: -1e6)
        other = CheckpointDirectory(path)
        if beats:
            with pytest.raises(DirectoryBusyError, match="owned by another live run"):
                other.claim(run_id, "other", 0, force=False)
        else:
            assert other.claim(run_id, "other", 0, force=False) == 2
            assert clock[0] >= place_of(path).patience_s > 3 * directory.heartbeat_s

    def test_a_holder_that_left_is_no_holder(self, path: str) -> None:
        """Its process may live on."""
        directory, _ = self.opened(path)
        directory.release(1)
        CheckpointDirectory(path).require_unheld()

    # ----------------------------------------------------------------- fence

    def test_an_older_term_neither_commits_nor_decides(self, path: str) -> None:
        """What a replaced incarnation writes late does not count."""
        old, run_id = self.opened(path)
        records = self.shard(old, G1)
        assert CheckpointDirectory(path).claim(run_id, "launch", 1, force=False) == 2
        with pytest.raises(GuardError, match="term 1 is fenced"):
            self.put(old, run_id, G1, records)
        with pytest.raises(GuardError, match="term 1 is fenced"):
            old.write_decision(1, 2, G1, "late")
        assert self.listed(old, run_id) == []
        assert old.parents() == ()

    def test_a_claim_during_the_commit_makes_it_no_success(
        self, path: str, patch: pytest.MonkeyPatch
    ) -> None:
        """The one who was replaced must not say that it is durable."""
        old, run_id = self.opened(path)
        records = self.shard(old, G1)
        publish = commits_module.publish

        def overtaken(name: str, text: bytes, *, replace: bool) -> bool:
            done = publish(name, text, replace=replace)
            if name.endswith("COMMIT"):
                patch.undo()
                CheckpointDirectory(path).claim(run_id, "launch", 1, force=False)
            return done

        patch.setattr(commits_module, "publish", overtaken)
        with pytest.raises(GuardError, match="fenced"):
            self.put(old, run_id, G1, records)

    def test_a_commit_that_comes_after_the_next_term_threw_it_away_is_never_resumed(
        self, path: str, patch: pytest.MonkeyPatch
    ) -> None:
        """The look at the term and the put are two requests; a whole restart fits between them."""
        old, run_id = self.opened(path)
        self.commit(old, run_id, G1)
        records = self.shard(old, G2)
        publish = commits_module.publish

        def overtaken(name: str, text: bytes, *, replace: bool) -> bool:
            if name.endswith("COMMIT"):
                patch.undo()
                newer = CheckpointDirectory(path)
                newer.claim(run_id, "launch", 1, force=False)
                newer.write_decision(2, 1, G1, "the newest durable one")
                newer.trash_unfinished(2)
            return publish(name, text, replace=replace)

        patch.setattr(commits_module, "publish", overtaken)
        with pytest.raises(GuardError, match="fenced"):
            self.put(old, run_id, G2, records)
        entries = old.catalogue(run_id)
        chain = newest_chain(parents_of(old.parents(), entries))
        assert [e.generation for e in entries if on_lineage(e.generation, chain)] == [G1]

    def test_an_emptied_directory_is_made_again_by_its_holder(self, path: str) -> None:
        """A claim that is missing is not a newer one; another start takes the number after it."""
        directory, run_id = self.opened(path)
        directory.write_decision(1, 1, None, "from scratch")
        for name in ("terms/t-000001", "RUN", "decisions/t-000001"):
            place_of(path).remove(f"{path}/{name}")
        assert directory.renew(1)
        assert directory.holds(1)
        assert CheckpointDirectory(path).open() == run_id
        assert [decision.term for decision in directory.parents()] == [1]

    # ----------------------------------------------------------------- commit

    def test_a_generation_is_there_with_its_commit_and_not_before(self, path: str) -> None:
        """Shards alone are none; the next term removes them, and nothing else."""
        directory, run_id = self.opened(path)
        self.commit(directory, run_id, G1)
        self.shard(directory, G2)
        assert self.listed(directory, run_id) == [G1]
        directory.claim(run_id, "launch", 1, force=False)
        directory.trash_unfinished(2)
        assert self.names(directory, G2) == set()
        assert self.names(directory, G1) == {SHARD, "idx-00000-a1.json", "COMMIT"}

    def test_a_commit_is_never_replaced(self, path: str) -> None:
        """The first one counts."""
        directory, run_id = self.opened(path)
        self.commit(directory, run_id, G1)
        before = place_of(path).read(f"{directory.generation_path(G1)}/COMMIT")
        with pytest.raises(StorageError, match="exists already"):
            self.put(directory, run_id, G1, ({"rank": 0, "file": "other", "index": "other"},))
        assert place_of(path).read(f"{directory.generation_path(G1)}/COMMIT") == before

    def test_a_commit_on_a_base_that_is_gone_is_refused(self, path: str) -> None:
        """A difference to nothing cannot be read."""
        directory, run_id = self.opened(path)
        record = self.shard(directory, G2)[0]
        with pytest.raises(StorageError, match="is gone, and a shard is a difference to it"):
            self.put(directory, run_id, G2, ({**record, "base": G1.name},))

    def test_a_replacement_needs_the_text_that_was_read(self, path: str) -> None:
        """Of several at the same time one counts; one whose answer was lost counts once."""
        self.opened(path)
        place, record = place_of(path), f"{path}/COMMIT.probe.tmp"
        assert not place.replace(record, b"", b"new")
        place.require_replacing(record)
        assert not place.exists(record)
        place.publish(record, b"old", replace=False)
        assert not place.replace(record, b"other", b"new")
        assert place.read(record) == b"old"
        if not place.is_store:
            assert place.replace(record, b"old", b"new")
            return
        done: list[bytes] = []
        meeting = threading.Barrier(4)

        def replace(text: bytes) -> None:
            meeting.wait(60)
            if place.replace(record, b"old", text):
                done.append(text)

        threads = [threading.Thread(target=replace, args=(b"new %d" % n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert done == [place.read(record)]

    def test_a_commit_loses_its_optimizer_state_or_keeps_it_wherever_a_process_dies(
        self, path: str, patch: pytest.MonkeyPatch
    ) -> None:
        """It reads back at once, and behind the next start, which leaves no other shards."""
        first, seen, ends = Generation(term=1, step=1), set[bool](), False
        for after in itertools.count():
            directory, run_id = self.opened(f"{path}/{after}")
            model, optimizer = trained()
            state = LiveState({"model": model}, {"optimizer": optimizer}, {})
            folder = commit_state(directory, run_id, first, state, step=1)
            commit, records = write_weights(directory, first, Unlimited(), term=1)
            mortal = Mortal(place_of(path), after)
            with patch.context() as dying, contextlib.suppress(Died):
                dying.setattr(rewriting_module, "place_of", lambda _, one=mortal: one)
                replace_commit(directory, commit, records, term=1)
                ends = True
            assert verify_generation(directory.path, first.name).ok, after
            directory.claim(run_id, "launch", 1, force=True)
            remove_replaced(directory, term=2)
            assert verify_generation(directory.path, first.name).ok, after
            shards = [n for n in place_of(path).names(folder) if n.startswith("shard-")]
            assert len(shards) == 1, after
            seen.add(holds_weights_only(read_commit(f"{folder}/COMMIT").records))
            if ends:
                break
        assert seen == {True, False}

    def test_a_process_that_dies_in_a_commit_leaves_it_or_nothing(
        self, path: str, patch: pytest.MonkeyPatch
    ) -> None:
        """Whoever comes next may go on in either case."""
        directory, run_id = self.opened(path)
        records = self.shard(directory, G1)
        place = place_of(path)
        put_under(patch, lambda _: Mortal(place, 0))
        with pytest.raises(Died, match="here"):
            self.put(directory, run_id, G1, records)
        patch.undo()
        assert self.listed(directory, run_id) == []
        self.put(directory, run_id, G1, records)
        assert self.listed(directory, run_id) == [G1]

    def test_a_shard_that_was_cut_short_is_not_there(self, path: str) -> None:
        """A process ends in the middle of its upload, or gives it up: nothing has the name, or
        nothing that reads as a shard."""
        directory, run_id = self.opened(path)
        folder = directory.create_generation(G1)
        writer = write_shard(f"{folder}/{SHARD}", 0, pages=PAGES - 1)
        if place_of(path).is_store:
            assert SHARD not in self.names(directory, G1)
        writer.discard()
        assert SHARD not in self.names(directory, G1)
        assert self.listed(directory, run_id) == []

    def test_a_shard_reads_as_it_was_written(self, path: str) -> None:
        """By several writers out of order, in ranges; beyond its end is an error."""
        directory, _ = self.opened(path)
        name = f"{directory.create_generation(G1)}/{SHARD}"
        image = content(7)
        writer = create_image(
            name, image_bytes=len(image), encoded=False, header_bytes=0, direct=False
        )
        late = [
            threading.Thread(target=writer.write_at, args=(4096 * i, image[4096 * i :][:4096]))
            for i in (2, 1)
        ]  # fmt: skip
        for thread in late:
            thread.start()
        time.sleep(0)
        writer.write_at(0, image[:4096])
        for thread in late:
            thread.join(60)
        writer.finish(len(image))
        source, memory = open_image(name, direct=False), Arena.anonymous(2 * 4096)
        assert source.length == len(image)
        source.read_at(4096, memory.view)
        assert memory.view == image[4096:]
        with pytest.raises(CorruptCheckpointError, match="ends at"):
            source.read_at(2 * 4096, memory.view)
        source.close()
        with pytest.raises((CorruptCheckpointError, StorageError), match="shard-00001"):
            open_image(name.replace("00000", "00001"), direct=False)

    def test_writers_that_are_given_up_do_not_wait_for_ever(self, path: str) -> None:
        """One chunk failed: those behind it end, and nothing is there."""
        directory, _ = self.opened(path)
        name = f"{directory.create_generation(G1)}/{SHARD}"
        writer = create_image(
            name, image_bytes=3 * 4096, encoded=False, header_bytes=0, direct=False
        )
        failed: list[BaseException] = []

        def write() -> None:
            try:
                writer.write_at(2 * 4096, content(0)[:4096])
            except StorageError as error:
                failed.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        writer.abandon()
        thread.join(60)
        assert not thread.is_alive()
        writer.discard()
        assert SHARD not in self.names(directory, G1)
        assert bool(failed) is place_of(path).is_store

    # ----------------------------------------------------------------- deletion

    def test_a_deletion_that_dies_leaves_a_whole_generation_or_none(
        self, path: str, patch: pytest.MonkeyPatch
    ) -> None:
        """In front of each change in turn: what is listed has all its files."""
        directory, run_id = self.opened(path)
        place = place_of(path)
        for after in itertools.count():
            assert after < MOST
            generation = Generation(term=1, step=10 + after)
            self.commit(directory, run_id, generation)
            put_under(patch, lambda _, n=after: Mortal(place, n))
            mortal = CheckpointDirectory(path)
            try:
                mortal.delete(generation)
                died = False
            except Died:
                died = True
            patch.undo()
            if generation in self.listed(directory, run_id):
                assert self.names(directory, generation) >= {SHARD, "idx-00000-a1.json"}
            if not died:
                break
        assert after > 1
        directory.claim(run_id, "launch", 1, force=False)
        directory.trash_unfinished(2)
        left = [Generation(term=1, step=10 + i) for i in range(after)]
        kept = self.listed(directory, run_id)
        assert all(not self.names(directory, g) for g in left if g not in kept)

    def test_a_pinned_checkpoint_is_not_deleted(self, path: str, patch: pytest.MonkeyPatch) -> None:
        """Also one that is pinned between the look and the deletion."""
        directory, run_id = self.opened(path)
        self.commit(directory, run_id, G1)
        place = place_of(path)

        class Pinning(Mortal):
            def __getattr__(self, name: str) -> Any:
                if name == "move":
                    patch.undo()
                    CheckpointDirectory(path).pin(G1, "paper")
                return super().__getattr__(name)

        put_under(patch, lambda _: Pinning(place, MOST))
        with pytest.raises(GuardError, match="is pinned as 'paper' and stays"):
            CheckpointDirectory(path).delete(G1)
        assert self.listed(directory, run_id) == [G1]
        assert directory.pins() == {"paper": G1}
        directory.unpin("paper")
        assert directory.delete(G1) >= PAGES * 4096
        assert self.listed(directory, run_id) == []
        assert self.names(directory, G1) == set()
        with pytest.raises(ConfigError, match="holds no committed checkpoint"):
            directory.pin(G1, "paper")

    def test_marks_are_seen_and_a_damaged_shard_is_found(self, path: str) -> None:
        """VERIFIED and SUSPECT reach the catalogue; verify reads what is there."""
        directory, run_id = self.opened(path)
        self.commit(directory, run_id, G1)
        directory.mark(G1, "SUSPECT")
        directory.mark(G1, "VERIFIED")
        directory.mark_ever_committed()
        entry = directory.catalogue(run_id)[0]
        assert (entry.verified, entry.health) == (True, "suspect")
        assert directory.ever_committed()
        result = verify_generation(directory.path, G1.name)  # its index is no index
        assert result.damaged
        assert not result.gone
        assert verify_generation(directory.path, G2.name).gone

    # ----------------------------------------------------------------- errors

    def test_storage_that_fails_is_never_taken_for_absence(
        self, path: str, patch: pytest.MonkeyPatch
    ) -> None:
        """Nothing there would mean: from scratch."""
        directory, run_id = self.opened(path)
        self.commit(directory, run_id, G1)
        place = place_of(path)

        class Failing(Mortal):
            def __getattr__(self, name: str) -> Any:
                if name in ("names", "exists", "read", "publish", "write"):
                    return self.fail
                return super().__getattr__(name)

            def fail(self, *args: Any, **kwargs: Any) -> None:
                raise OSError(5, "the storage does not answer")

        put_under(patch, lambda _: Failing(place, MOST))
        failing = CheckpointDirectory(path)
        for ask in (
            lambda: failing.catalogue(run_id),
            failing.highest_term,
            failing.parents,
            failing.ever_committed,
            failing.require_writable,
            lambda: failing.trash(G1),
            lambda: failing.claim(run_id, "launch", 1, force=False),
        ):
            with pytest.raises(StorageError, match="the storage does not answer"):
                ask()
        patch.undo()
        assert self.listed(directory, run_id) == [G1]

    def test_the_claim_says_whose_it_is(self, path: str) -> None:
        """As a person reads it."""
        _, run_id = self.opened(path)
        text = place_of(path).read(f"{path}/terms/t-000001")
        claim = from_json(TermFile, text, where="claim")
        assert (claim.run_id, claim.launch_id, claim.term) == (run_id, "launch", 1)


def content(seed: int, pages: int = PAGES) -> memoryview:
    """Pages that differ."""
    arena = Arena.anonymous(pages * 4096)
    for page in range(pages):
        arena.view[4096 * page : 4096 * page + 4096] = bytes([1 + (seed + page) % 250]) * 4096
    return arena.view


def write_shard(path: str, seed: int, pages: int = PAGES) -> Any:
    """All bytes are on their way."""
    writer = create_image(
        path, image_bytes=PAGES * 4096, encoded=False, header_bytes=0, direct=False
    )
    writer.write_at(0, content(seed, pages))
    return writer
