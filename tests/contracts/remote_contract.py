"""Remote copies: what an object store offers is whole, newest, and of one lineage; or an error."""

import contextlib
import errno
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from autockpt.executors.image.container import read_index
from autockpt.executors.keeper.saving.delta_bases import Base
from autockpt.executors.linux.memory import Arena
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.catalogue import verify_generation
from autockpt.executors.storage.directory import claims as claims_module
from autockpt.executors.storage.directory import lease as lease_module
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import read_commit
from autockpt.executors.storage.places import object_store as objects_module
from autockpt.executors.storage.places.place import MAX_RECORD_BYTES
from autockpt.executors.storage.remote import Objects, RemoteCopies
from autockpt.values.errors import (
    ConfigError,
    CorruptCheckpointError,
    DirectoryBusyError,
    GuardError,
    NoCheckpointError,
    StorageError,
)
from autockpt.values.generation import Generation
from autockpt.values.record import to_json
from tests.contracts.faults import Death, Killed, open_descriptors
from tests.unit.executors.checkpoints import CHUNK, commit_images, commit_state
from tests.unit.executors.states import Module, trained

PART = 2**16
"""Of uploads and downloads here, so that a shard has several."""
MANY = 400
"""More operations than any copy makes."""
MARKS = {"VERIFIED", "CORRUPT", "SUSPECT"}


def g(step: int, term: int = 1) -> Generation:
    """One generation."""
    return Generation(term=term, step=step)


def image(seed: int) -> memoryview:
    """Bytes of two chunks; half of them are the same in all."""
    arena = Arena.anonymous(2 * CHUNK)
    arena.view[:CHUNK] = random.Random(seed).randbytes(CHUNK)
    arena.view[CHUNK:] = random.Random(0).randbytes(CHUNK)
    return arena.view


class Trained:
    """A checkpoint directory whose newest claim is ours."""

    def __init__(self, path: Path, launch: str = "launch") -> None:
        self.path = path
        self.directory = CheckpointDirectory(str(path))
        self.run_id = self.directory.open()
        self.launch = launch
        self.term = self.directory.claim(self.run_id, launch, 0, force=False)

    def again(self, parent: Generation | None) -> None:
        """The next incarnation, and what it resumed from."""
        self.term = self.directory.claim(self.run_id, self.launch, 0, force=False)
        self.directory.write_decision(self.term, 1, parent, "test")

    def save(self, step: int, *, base: int | None = None, ranks: int = 1) -> Generation:
        """Commits a generation of this incarnation, perhaps as a difference to an older one."""
        against = None
        if base is not None:
            index = self.folder(g(base, self.term)) / "idx-00000-a1.json"
            against = Base(image(base), read_index(index.read_bytes(), where="index"), bases=0)
        generation = g(step, self.term)
        commit_images(
            self.directory, self.run_id, generation,
            [image(step + 1000 * rank) for rank in range(ranks)], step=step, base=against,
            codec="planes" if against else "none", layouts=["layout"] * ranks,
        )  # fmt: skip
        return generation

    def folder(self, generation: Generation) -> Path:
        """Where it stands."""
        return Path(self.directory.generation_path(generation))

    def files(self, generation: Generation) -> dict[str, bytes]:
        """All that a copy must have of it."""
        return contents(self.folder(generation))


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a generation without its marks and without what a death left half written."""
    files = (p for p in folder.iterdir() if p.name not in MARKS and p.suffix != ".tmp")
    return {p.name: p.read_bytes() for p in files}


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }  # fmt: skip


def close_all(folder: Path) -> None:
    """The files below a folder that this process has open, as its end would."""
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(fd).startswith(str(folder)):
                os.close(int(fd.name))


class Life:
    """Counts the operations on a store and ends before or after number `at`, for good."""

    OPERATIONS = ("create", "write", "read", "delete", "sizes", "folders", "upload", "download")

    def __init__(self, objects: Objects, at: int = MANY, *, after: bool = False) -> None:
        self._objects, self._at, self._after = objects, at, after
        self.calls: list[tuple[str, str]] = []
        self.hooks: list[Callable[[str, str], None]] = []
        """Heard before each operation."""

    @contextmanager
    def lived(self) -> Iterator["Life"]:
        """Only inside this block."""
        with pytest.MonkeyPatch.context() as patch:
            for name in self.OPERATIONS:
                patch.setattr(self._objects, name, self._wrap(name), raising=False)
            yield self

    def ends(self, work: Callable[[], object]) -> bool:
        """Whether `work` was cut off."""
        with self.lived():
            try:
                work()
            except Killed:
                return True
        return False

    def _wrap(self, name: str) -> Callable[..., Any]:
        real = getattr(self._objects, name)

        def call(*args: Any) -> Any:
            place = len(self.calls)
            # An upload names its file first.
            told = args[1 if name == "upload" else 0] if args else ""
            self.calls.append((name, str(told)))
            if place > self._at or (place == self._at and not self._after):
                raise Killed(f"before {place}: {name} {told}")
            for hook in self.hooks:
                hook(name, str(told))
            result = real(*args)
            if place == self._at:
                raise Killed(f"after {place}: {name} {told}")
            return result

        return call


class Asked:
    """A gate that does something when bytes ask for the first time."""

    longest_wait_s = 0.0

    def __init__(self, work: Callable[[], object], at: int = 0) -> None:
        self._work, self._at = work, at
        self.count = 0

    def wait(self, nbytes: int) -> float:
        """Lets everything pass."""
        if self.count == self._at:
            self._work()
        self.count += 1
        return 0.0


class Refusals:
    """The store's library fails once, at call number `at`."""

    CALLS = (
        "put", "get", "get_range", "delete", "list", "list_with_delimiter", "open_writer",
    )  # fmt: skip

    def __init__(self, at: int) -> None:
        self._at = at
        self.calls = 0
        self.told = ""
        """The object that the failed call was for."""
        self._lock = threading.Lock()

    @contextmanager
    def armed(self) -> Iterator["Refusals"]:
        """Only inside this block."""
        import obstore

        with pytest.MonkeyPatch.context() as patch:
            for name in self.CALLS:
                patch.setattr(obstore, name, self._wrap(getattr(obstore, name)))
            yield self

    def _wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        from obstore.exceptions import GenericError

        def call(store: Any, name: str = "", *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls += 1
                mine = self.calls == self._at + 1
            if mine:
                self.told = name
                raise GenericError("the network is down\nand more")
            return real(store, *([name] if name else []), *args, **kwargs)

        return call


class RemoteContract:
    """Subclass and give `fresh`: each call an empty place in an object store."""

    stride: ClassVar[int] = 1
    """Every how many operations a copy is cut off: back ends over a network are slow."""

    @pytest.fixture
    def fresh(self, tmp_path: Path) -> Callable[[], Objects]:
        """Makes an empty place."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that the shards of a test have several."""
        monkeypatch.setattr(objects_module, "PART_BYTES", PART)

    @pytest.fixture(autouse=True)
    def no_leak(self, fresh: Callable[[], Objects], small_parts: None) -> Iterator[None]:
        """Whatever happens, no descriptor stays open."""
        fresh().read("nothing")  # the library's own threads stand
        before = open_descriptors()
        yield
        if open_descriptors() > before:
            gc.collect()  # of what a traceback holds
        assert open_descriptors() <= before

    @pytest.fixture
    def objects(self, fresh: Callable[[], Objects]) -> Objects:
        """An empty place."""
        return fresh()

    @pytest.fixture
    def copies(self, objects: Objects) -> RemoteCopies:
        """In it."""
        return RemoteCopies(objects)

    @pytest.fixture
    def run(self, tmp_path: Path) -> Trained:
        """A directory, term 1 claimed."""
        return Trained(tmp_path / "here")

    @pytest.fixture
    def two(self, run: Trained, copies: RemoteCopies) -> Trained:
        """Two generations, both in the store."""
        for step in (1, 2):
            copies.push(run.directory, run.save(step))
        return run

    def offered(self, objects: Objects) -> list[Generation]:
        """What a restart may take, as a new process sees it."""
        copies = RemoteCopies(objects)
        return copies.eligible(copies.commits())

    def taken_over(self, objects: Objects, path: Path, step: int = 1) -> Trained:
        """Another directory brings the newest, claims, and copies what it trained."""
        copies = RemoteCopies(objects)
        resumed = copies.pull(str(path))[0].generation
        other = Trained(path, launch=f"other {path.name}")
        other.directory.write_decision(other.term, 1, resumed, "test")
        copies.push(other.directory, other.save(step))
        return other

    # ----------------------------------------------------------------- there and back

    def test_a_generation_comes_back_byte_for_byte(
        self, run: Trained, copies: RemoteCopies, tmp_path: Path
    ) -> None:
        """With its marks, the claim and the lineage; nothing else of the run."""
        run.again(run.save(1))
        second = run.save(7, ranks=3)
        pushed = copies.push(run.directory, second)
        heard: list[int] = []
        copied, told = copies.pull(str(tmp_path / "there"), moved=heard.append)
        assert (copied.generation, copied.step, told) == (second, 7, [])
        assert contents(tmp_path / "there" / second.name) == run.files(second)
        assert (tmp_path / "there" / second.name / "VERIFIED").exists()
        shards = [len(data) for name, data in run.files(second).items() if name != "COMMIT"]
        assert sum(heard) == copied.bytes == pushed.bytes == sum(shards)
        there = CheckpointDirectory(str(tmp_path / "there"))
        assert there.open() == run.run_id
        assert there.ever_committed()
        assert there.parents() == run.directory.parents()
        assert [e.generation for e in there.catalogue(run.run_id)] == [second]

    def test_a_trained_state_comes_back_and_one_with_nan_only_by_name(
        self, run: Trained, copies: RemoteCopies, tmp_path: Path
    ) -> None:
        """It is brought, found to be sick, marked, and the older one is taken."""
        model, optimizer = trained()
        sound = LiveState.of(model=model, optimizer=optimizer)
        sick = LiveState.of(model=Module([("w", torch.full((9,), float("nan")))]))
        for step, state in ((1, sound), (2, sick)):
            commit_state(run.directory, run.run_id, g(step), state, step=step)
            copies.push(run.directory, g(step))
        copied, told = copies.pull(str(tmp_path / "there"))
        assert copied.generation == g(1)
        (why,) = (tmp_path / "there" / "quarantine").glob("*.why")
        assert "NaN in" in why.read_text()
        assert len(told) == 1
        assert contents(tmp_path / "there" / g(1).name) == run.files(g(1))
        assert copies.pull(str(tmp_path / "named"), g(2))[0].generation == g(2)
        assert (tmp_path / "named" / g(2).name / "SUSPECT").exists()

    def test_another_launch_claims_what_was_brought_at_once(
        self, tmp_path: Path, copies: RemoteCopies, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Though the claim in it is of a machine that nobody knows to be dead; the number grows."""
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(claims_module, "boot_id", lambda: "another boot")
            run = Trained(tmp_path / "here")
            run.again(None)
        copies.push(run.directory, run.save(1))
        copies.pull(str(tmp_path / "there"))
        there = CheckpointDirectory(str(tmp_path / "there"))
        monkeypatch.setattr(lease_module.time, "sleep", lambda _: pytest.fail("it waits"))
        assert there.claim(run.run_id, "stranger", 0, force=False) == 3

    def test_only_what_is_new_is_moved(self, run: Trained, objects: Objects) -> None:
        """A second time nothing is, and COMMIT is all that is asked for."""
        copies = RemoteCopies(objects)
        for step in (1, 2):
            moved = copies.push(run.directory, run.save(step)).bytes
            data = run.files(g(step))
            assert moved == sum(map(len, data.values())) - len(data["COMMIT"])
        with Life(objects).lived() as life:
            assert [copies.push(run.directory, g(step)).bytes for step in (1, 2)] == [0, 0]
        assert life.calls == [("read", f"{g(step).name}/COMMIT") for step in (1, 2)]

    def test_what_is_in_the_directory_is_not_fetched(self, two: Trained, objects: Objects) -> None:
        """A pull into the directory itself."""
        with Life(objects).lived() as life:
            copied, _ = RemoteCopies(objects).pull(str(two.path))
        assert (copied.generation, copied.bytes) == (g(2), 0)
        assert "download" not in dict(life.calls)

    def test_a_difference_comes_with_its_bases(
        self, run: Trained, copies: RemoteCopies, tmp_path: Path
    ) -> None:
        """Both ways, and only with them it is whole."""
        run.save(1)
        run.save(2, base=1)
        run.save(3, base=2)
        chain = copies.bytes_to_push(run.directory, g(3))
        copies.push(run.directory, g(1))
        rest = copies.bytes_to_push(run.directory, g(3))
        assert chain > rest == copies.push(run.directory, g(3)).bytes
        assert copies.eligible(copies.commits()) == [g(3), g(2), g(1)]
        assert copies.pull(str(tmp_path / "there"))[0].generation == g(3)
        for step in (1, 2, 3):
            assert contents(tmp_path / "there" / g(step).name) == run.files(g(step))

    # ----------------------------------------------------------------- the object store itself

    def test_of_many_creators_one_wins(self, objects: Objects) -> None:
        """And its bytes stay."""
        start, won = threading.Barrier(8), [False] * 8

        def create(i: int) -> None:
            start.wait(20)
            won[i] = objects.create("terms/t-000001", b"%d" % i)

        threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(won) == 1
        assert objects.read("terms/t-000001") == b"%d" % won.index(True)
        assert not objects.create("terms/t-000001", b"late")

    def test_objects_are_whole_replaced_and_gone(self, objects: Objects, tmp_path: Path) -> None:
        """Absence is an answer; a folder's name is no prefix of another's."""
        assert objects.read("a/b") is None
        objects.delete("a/b")
        assert objects.sizes("a") == {}
        assert objects.folders() == []
        objects.write("a/b", b"one")
        objects.write("a/b", b"three")
        objects.write("ab/c", b"")
        assert objects.read("a/b") == b"three"
        assert objects.sizes("a") == {"b": 5}
        assert objects.folders() == ["a", "ab"]
        for size in (0, 1, PART - 1, PART, 3 * PART + 7):
            data = random.Random(size).randbytes(size)
            (tmp_path / "source").write_bytes(data)
            gate = Asked(lambda: None)
            objects.upload(str(tmp_path / "source"), "a/b", size, gate)
            assert gate.count == -(-size // objects_module.PART_BYTES)
            assert objects.sizes("a") == {"b": size}
            objects.download("a/b", str(tmp_path / "target"), size, lambda n: None)
            assert (tmp_path / "target").read_bytes() == data
        objects.delete("a/b")
        assert objects.read("a/b") is None

    def test_an_upload_that_is_given_up_leaves_no_object(
        self, objects: Objects, tmp_path: Path
    ) -> None:
        """The file got shorter; what was there stays."""
        objects.write("a/b", b"old")
        (tmp_path / "source").write_bytes(bytes(3 * PART))
        with pytest.raises(NoCheckpointError, match=f"ended at {3 * PART} of {4 * PART} bytes"):
            objects.upload(str(tmp_path / "source"), "a/b", 4 * PART, Asked(lambda: None))
        assert objects.read("a/b") == b"old"

    # ----------------------------------------------------------------- retention

    @pytest.mark.parametrize(
        ("keep", "stay"), [(1, [5, 4]), (2, [5, 4]), (3, [5, 4, 3, 2, 1]), (9, [5, 4, 3, 2, 1])]
    )
    def test_retention_leaves_the_newest_and_what_they_need(
        self, run: Trained, objects: Objects, tmp_path: Path, keep: int, stay: list[int]
    ) -> None:
        """COMMIT goes before anything else of a generation; what stays is whole."""
        for step, base in ((1, None), (2, 1), (3, 2), (4, None), (5, 4)):
            run.save(step, base=base)
        copies = RemoteCopies(objects)
        for step in range(1, 6):
            copies.push(run.directory, g(step))
        with Life(objects).lived() as life:
            gone = copies.retire(keep)
        assert gone == [g(step) for step in range(1, 6) if step not in stay]
        assert copies.retire(keep) == []
        deleted = [name for what, name in life.calls if what == "delete"]
        for generation in gone:
            mine = [n.split("/")[1] for n in deleted if n.startswith(generation.name)]
            assert mine[0] == "COMMIT"
            assert sorted(mine) == sorted(run.files(generation))
            assert objects.sizes(generation.name) == {}
        assert self.offered(objects) == [g(step) for step in stay]
        for step in stay:
            copies.pull(str(tmp_path / str(step)), g(step))
            assert contents(tmp_path / str(step) / g(step).name) == run.files(g(step))

    def test_retention_passes_over_pinned_copies(self, run: Trained, objects: Objects) -> None:
        """Those and their bases stay, until the pin is taken away."""
        for step, base in ((1, None), (2, 1), (3, None), (4, None)):
            run.save(step, base=base)
            RemoteCopies(objects).push(run.directory, g(step))
        objects.write(f"{g(2).name}/PINNED", b"paper\n")
        assert RemoteCopies(objects).retire(1) == [g(3)]
        assert self.offered(objects) == [g(4), g(2), g(1)]
        objects.delete(f"{g(2).name}/PINNED")
        assert RemoteCopies(objects).retire(1) == [g(1), g(2)]

    def test_retention_removes_what_was_never_completed(
        self, two: Trained, objects: Objects
    ) -> None:
        """Of older ones; not what may still be on its way, and nothing that is not ours."""
        objects.delete(f"{g(1).name}/COMMIT")
        for name in (f"{g(1).name}/notes.txt", f"{g(9).name}/shard-00000-a1.safetensors"):
            objects.write(name, b"x")
        objects.write(f"{g(1).name}/shard-00007-a1.safetensors", b"x")
        assert RemoteCopies(objects).retire(1) == []
        assert objects.sizes(g(1).name) == {"notes.txt": 1}
        assert objects.sizes(g(9).name) == {"shard-00000-a1.safetensors": 1}
        assert self.offered(objects) == [g(2)]

    # ----------------------------------------------------------------- death at every operation

    def whole(self, objects: Objects, run: Trained) -> list[Generation]:
        """Everything that is offered; every object of it is what the directory has."""
        offered = self.offered(objects)
        for generation in offered:
            names = objects.sizes(generation.name)
            found = {name: objects.read(f"{generation.name}/{name}") for name in names}
            assert found == run.files(generation)
        return offered

    @pytest.mark.parametrize("after", [False, True])
    def test_death_at_any_operation_of_a_push(
        self, run: Trained, fresh: Callable[[], Objects], tmp_path: Path, after: bool
    ) -> None:
        """What had been pushed is offered, nothing that is not whole, and the next push ends it."""
        run.save(1)
        run.save(2)
        run.again(g(2))
        last = run.save(3, ranks=2)
        for at in range(0, MANY, self.stride):
            objects = fresh()
            RemoteCopies(objects).push(run.directory, g(1))
            died = Life(objects, at, after=after).ends(
                lambda o=objects: RemoteCopies(o).push(run.directory, last)  # type: ignore[misc]
            )
            found = self.whole(objects, run)
            assert found in ([g(1)], [last, g(1)])
            RemoteCopies(objects).push(run.directory, last)
            assert self.whole(objects, run) == [last, g(1)]
            if not died:
                break
        assert at > 8
        assert found == [last, g(1)]
        RemoteCopies(objects).pull(str(tmp_path / "there"))
        assert contents(tmp_path / "there" / last.name) == run.files(last)

    def test_death_between_any_parts_of_a_push(
        self, run: Trained, fresh: Callable[[], Objects], tmp_path: Path
    ) -> None:
        """Half an upload is no object."""

        def die() -> None:
            raise Killed

        last = run.save(2, ranks=2)
        gate = Asked(die)
        for at in range(0, MANY, self.stride):
            objects, gate = fresh(), Asked(die, at)
            try:
                RemoteCopies(objects).push(run.directory, last, gate)
            except Killed:
                assert self.offered(objects) == []
            RemoteCopies(objects).push(run.directory, last)
            assert self.whole(objects, run) == [last]
            if gate.count < at:
                break
        assert at > 4

    @pytest.mark.parametrize("after", [False, True])
    def test_death_at_any_operation_of_retention(
        self, run: Trained, fresh: Callable[[], Objects], tmp_path: Path, after: bool
    ) -> None:
        """What it is to leave is offered and whole all the time; the next one ends it."""
        for step, base in ((1, None), (2, 1), (3, None), (4, 3)):
            run.save(step, base=base)
        for at in range(0, MANY, self.stride):
            objects = fresh()
            for step in (2, 4):
                RemoteCopies(objects).push(run.directory, g(step))
            died = Life(objects, at, after=after).ends(
                lambda o=objects: RemoteCopies(o).retire(1)  # type: ignore[misc]
            )
            assert self.whole(objects, run)[:2] == [g(4), g(3)]
            RemoteCopies(objects).retire(1)
            assert self.offered(objects) == [g(4), g(3)]
            assert objects.sizes(g(1).name) == objects.sizes(g(2).name) == {}
            if not died:
                break
        assert at > 8

    @pytest.mark.parametrize("after", [False, True])
    def test_death_at_any_operation_of_a_pull(
        self, run: Trained, objects: Objects, tmp_path: Path, after: bool
    ) -> None:
        """The directory lists nothing that is not whole, and the next pull ends it."""
        run.save(1)
        run.save(2, base=1)
        RemoteCopies(objects).push(run.directory, g(2))
        for at in range(0, MANY, self.stride):
            path = tmp_path / f"{at}"
            died = Life(objects, at, after=after).ends(
                lambda p=path: RemoteCopies(objects).pull(str(p))  # type: ignore[misc]
            )
            self.complete(run, objects, path)
            if not died:
                break
        assert at > 8

    def test_death_at_any_call_of_a_pull(
        self, run: Trained, objects: Objects, tmp_path: Path
    ) -> None:
        """Of those that write the directory."""
        run.save(1)
        run.save(2, base=1)
        RemoteCopies(objects).push(run.directory, g(2))
        for at in range(0, MANY, 5 * self.stride):
            path, died = tmp_path / f"{at}", False
            with Death(at).armed():
                try:
                    RemoteCopies(objects).pull(str(path))
                except Killed:
                    died = True
            close_all(path)
            self.complete(run, objects, path)
            if not died:
                break
        assert at > 20

    def complete(self, run: Trained, objects: Objects, path: Path) -> None:
        """What a pull that was cut off listed is whole; the next one brings all."""
        listed = CheckpointDirectory(str(path)).catalogue(run.run_id)
        for entry in listed:
            assert contents(path / entry.generation.name) == run.files(entry.generation)
        copies = RemoteCopies(objects)
        expected = None if g(2) in [entry.generation for entry in listed] else g(2)
        assert copies.missing(str(path)) == expected
        assert copies.pull(str(path))[0].generation == g(2)
        for step in (1, 2):
            assert contents(path / g(step).name) == run.files(g(step))
        there = CheckpointDirectory(str(path))
        assert there.ever_committed()
        assert there.claim(run.run_id, "stranger", 0, force=False) == 2

    # ----------------------------------------------------------------- a store that fails

    def test_an_error_at_any_request_is_told_and_names_the_object(
        self, run: Trained, fresh: Callable[[], Objects], tmp_path: Path
    ) -> None:
        """Of a push, of retention and of a pull; the same thing once more succeeds."""
        for step in (1, 2):
            run.save(step)
        steps: list[Callable[[Objects, Path], object]] = [
            lambda o, p: RemoteCopies(o).push(run.directory, g(2)),
            lambda o, p: RemoteCopies(o).retire(1),
            lambda o, p: RemoteCopies(o).pull(str(p)),
        ]
        for number, step in enumerate(steps):
            for at in range(0, MANY, self.stride):
                objects, path = fresh(), tmp_path / f"{number} {at}"
                RemoteCopies(objects).push(run.directory, g(1))
                if number:
                    RemoteCopies(objects).push(run.directory, g(2))
                with Refusals(at).armed() as refusals:
                    if refused := self.refused(step, objects, path):
                        assert f"{objects.url}/{refusals.told}: cannot " in refused
                        assert refused.endswith("the network is down")
                assert bool(refused) == (refusals.calls > at)
                assert self.offered(objects)[:1] in ([g(1)], [g(2)])
                step(objects, path)
                assert self.whole(objects, run)[0] == g(2)
                if not refused:
                    break
            assert at > 6

    def refused(self, step: Callable[[Objects, Path], object], objects: Objects, path: Path) -> str:
        """The text of the storage error."""
        try:
            step(objects, path)
        except StorageError as error:
            return str(error)
        return ""

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
    def test_a_disk_that_fails_while_a_copy_is_brought_is_a_storage_error(
        self, two: Trained, copies: RemoteCopies, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch, code: int,
    ) -> None:  # fmt: skip
        """It names the file; the next pull brings the generation."""

        def full(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(StorageError, match=rf"{g(2).name}.*: cannot write: .*"):
                copies.pull(str(tmp_path / "there"))
        assert CheckpointDirectory(str(tmp_path / "there")).catalogue(two.run_id) == ()
        assert copies.pull(str(tmp_path / "there"))[0].generation == g(2)

    def test_a_link_in_the_place_of_a_shard_is_not_followed(
        self, two: Trained, copies: RemoteCopies, tmp_path: Path
    ) -> None:
        """Nobody makes us write somewhere else."""
        (tmp_path / "precious").write_bytes(b"precious")
        folder = tmp_path / "there" / g(2).name
        folder.mkdir(parents=True)
        (folder / "shard-00000-a1.safetensors").symlink_to(tmp_path / "precious")
        with pytest.raises(StorageError, match="cannot write"):
            copies.pull(str(tmp_path / "there"))
        assert (tmp_path / "precious").read_bytes() == b"precious"

    # ----------------------------------------------------------------- the fence

    def test_of_two_directories_of_a_run_one_is_fenced(
        self, two: Trained, objects: Objects, tmp_path: Path
    ) -> None:
        """The one that was continued elsewhere; also when it claims again, as often as it likes."""
        self.taken_over(objects, tmp_path / "other")
        offered = self.offered(objects)
        assert offered == [g(1, 2), g(2), g(1)]
        before = {name: objects.read(f"decisions/{name}") for name in objects.sizes("decisions")}
        late = [two.save(3)]
        for _ in range(3):
            two.again(late[-1])
            late.append(two.save(4))
        for generation in late:
            with pytest.raises(GuardError, match=r"fenced: another directory .* continues this"):
                RemoteCopies(objects).push(two.directory, generation)
            assert objects.read(f"{generation.name}/COMMIT") is None
        assert self.offered(objects) == offered
        assert set(objects.sizes("terms")) == {"t-000001", "t-000002"}
        assert before == {
            name: objects.read(f"decisions/{name}") for name in objects.sizes("decisions")
        }

    @pytest.mark.parametrize(("claims", "theirs"), [(1, 1), (1, 2), (1, 3), (2, 3)])
    def test_of_two_that_went_on_from_the_same_checkpoint_neither_takes_from_the_other(
        self, two: Trained, objects: Objects, tmp_path: Path, claims: int, theirs: int
    ) -> None:
        """Their generations have the same names and other pasts, also when the one that copies was
        restarted more often; the fenced one keeps its own."""
        other, newest = self.taken_over(objects, tmp_path / "other", step=5), g(5, 2)
        for _ in range(theirs - 1):
            other.again(newest)
            newest = other.save(6)
            RemoteCopies(objects).push(other.directory, newest)
        for _ in range(claims):
            two.again(g(2))
            mine = two.save(4)
        before = {name: Path(two.path, name).read_bytes() for name in ("terms/t-000002", "RUN")}
        with pytest.raises(ConfigError, match=r"and both trained on\. Keep one"):
            RemoteCopies(objects).missing(str(two.path))
        with pytest.raises(ConfigError, match=r"and both trained on\. Keep one"):
            RemoteCopies(objects).pull(str(two.path))
        assert before == {name: Path(two.path, name).read_bytes() for name in before}
        assert not Path(two.path, newest.name).exists()
        assert verify_generation(str(two.path), mine.name).ok

    @pytest.mark.parametrize("again", [False, True])
    @pytest.mark.parametrize("moment", ["shards", "COMMIT"])
    def test_a_takeover_during_a_push_fences_it(
        self, two: Trained, objects: Objects, tmp_path: Path, moment: str, again: bool
    ) -> None:
        """Between the shards and COMMIT, or just before COMMIT is put: nothing newer is offered."""
        if again:
            two.again(g(2))
        late = two.save(3)
        offered: list[Generation] = []

        def take_over(name: str = "create", told: str = f"{late.name}/COMMIT") -> None:
            if not offered and name == "create" and told == f"{late.name}/COMMIT":
                self.taken_over(objects, tmp_path / "other", step=5)
                offered.extend(self.offered(objects))

        gate = Asked(take_over if moment == "shards" else lambda: None, 1)
        with Life(objects).lived() as life:
            if moment == "COMMIT":
                life.hooks.append(take_over)
            with pytest.raises(GuardError, match="fenced"):
                RemoteCopies(objects).push(two.directory, late, gate)
        assert offered[0].step == 5
        assert offered[0].term == two.term + 1
        assert self.offered(objects) == offered
        if moment == "shards":
            assert objects.read(f"{late.name}/COMMIT") is None

    def test_a_copied_directory_with_another_generation_of_that_name_is_refused(
        self, two: Trained, objects: Objects, tmp_path: Path
    ) -> None:
        """Both have the claim; the first COMMIT stays."""
        import shutil

        shutil.copytree(two.path, tmp_path / "twin")
        RemoteCopies(objects).push(two.directory, two.save(3))
        twin = CheckpointDirectory(str(tmp_path / "twin"))
        commit_images(twin, two.run_id, g(3), [image(77)])
        with pytest.raises(GuardError, match=r"holds another step 3 \(term 1\) than"):
            RemoteCopies(objects).push(twin, g(3))
        assert objects.read(f"{g(3).name}/COMMIT") == two.files(g(3))["COMMIT"]

    # ----------------------------------------------------------------- lineage

    def test_what_a_rollback_left_behind_is_not_offered(
        self, two: Trained, objects: Objects, tmp_path: Path
    ) -> None:
        """Once the decision is known: by the directory first, by the store with the next push."""
        copies = RemoteCopies(objects)
        copies.push(two.directory, two.save(3))
        two.again(g(2))
        assert self.offered(objects)[0] == g(3)
        assert copies.eligible(copies.commits(), two.directory) == [g(2), g(1)]
        assert copies.missing(str(tmp_path / "empty")) == g(3)
        copies.push(two.directory, two.save(1))
        assert self.offered(objects) == [g(1, 2), g(2), g(1)]
        objects.delete(f"{g(1, 2).name}/COMMIT")
        copied, _ = copies.pull(str(tmp_path / "there"))
        assert copied.generation == g(2)
        assert CheckpointDirectory(str(tmp_path / "there")).parents() == two.directory.parents()

    def test_what_the_directory_left_behind_is_nothing_as_new(
        self, two: Trained, objects: Objects
    ) -> None:
        """The newest that it may take is damaged; the store has it."""
        copies = RemoteCopies(objects)
        copies.push(two.directory, two.save(3))
        two.again(g(2))
        assert copies.missing(str(two.path)) is None
        two.directory.mark(g(2), "CORRUPT")
        assert copies.missing(str(two.path)) == g(2)
        assert copies.pull(str(two.path))[0].generation == g(2)
        assert copies.missing(str(two.path)) is None

    # ----------------------------------------------------------------- what is missing

    def test_nothing_is_missing_while_the_directory_has_as_much(
        self, two: Trained, copies: RemoteCopies, tmp_path: Path
    ) -> None:
        """Also more; an empty or older directory lacks the newest."""
        assert copies.missing(str(two.path)) is None
        two.save(3)
        assert copies.missing(str(two.path)) is None
        assert copies.missing(str(tmp_path / "empty")) == g(2)
        assert not (tmp_path / "empty").exists()
        copies.pull(str(tmp_path / "older"), g(1))
        assert copies.missing(str(tmp_path / "older")) == g(2)
        two.again(g(3))
        two.save(1)
        assert copies.missing(str(two.path)) is None

    @pytest.mark.parametrize("mark", ["QUARANTINE", "SUSPECT"])
    @pytest.mark.parametrize("damaged", [False, True])
    def test_what_is_put_off_in_the_directory_is_neither_missing_nor_brought_unless_it_is_named(
        self, two: Trained, copies: RemoteCopies, mark: str, damaged: bool
    ) -> None:
        """By a person, or because its numbers are suspect: a start would ask for it for ever."""
        two.directory.mark(g(2), mark)
        if damaged:
            (two.folder(g(2)) / "COMMIT").write_bytes(b"{}")
        assert copies.missing(str(two.path)) is None
        two.directory.release(two.term)
        assert copies.pull(str(two.path))[0].generation == g(1)
        assert copies.missing(str(two.path)) is None
        assert (two.folder(g(2)) / mark).exists()
        assert copies.pull(str(two.path), g(2))[0].generation == g(2)

    def test_an_empty_store_has_nothing_to_offer(
        self, run: Trained, copies: RemoteCopies, tmp_path: Path
    ) -> None:
        """No run, no generation; and the directory is not made."""
        assert copies.run_id() is None
        assert copies.commits() == copies.retire(1) == []
        assert copies.missing(str(tmp_path / "empty")) is None
        with pytest.raises(NoCheckpointError, match="holds no good checkpoint"):
            copies.pull(str(tmp_path / "empty"))
        copies.push(run.directory, run.save(1))
        with pytest.raises(NoCheckpointError, match=r"holds no step 2 \(term 1\)"):
            copies.pull(str(tmp_path / "empty"), g(2))
        assert not (tmp_path / "empty").exists()

    @pytest.mark.parametrize("damage", ["mark", "mark on the base", "commit", "shard gone"])
    def test_a_damaged_generation_in_the_directory_is_healed(
        self, run: Trained, copies: RemoteCopies, damage: str
    ) -> None:
        """Its copy takes its place, and what was damaged is set aside for a person."""
        run.save(1)
        run.save(2, base=1)
        copies.push(run.directory, g(2))
        files = run.files(g(1)), run.files(g(2))
        shard = run.folder(g(2)) / "shard-00000-a1.safetensors"
        aside = g(2).name
        if damage == "mark":
            run.directory.mark(g(2), "CORRUPT")
        elif damage == "mark on the base":
            run.directory.mark(g(1), "CORRUPT")
            run.directory.mark(g(2), "CORRUPT")
        elif damage == "commit":
            (run.folder(g(2)) / "COMMIT").write_bytes(b"{}")
        else:
            shard.unlink()
            run.directory.mark(g(2), "CORRUPT")
        assert copies.missing(str(run.path)) == g(2)
        copied, _ = copies.pull(str(run.path))
        assert copied.generation == g(2)
        assert (run.files(g(1)), run.files(g(2))) == files
        assert copies.missing(str(run.path)) is None
        kept = sorted(p.name for p in (run.path / "quarantine").iterdir() if p.is_dir())
        assert any(name.startswith(aside) for name in kept)
        assert len(list((run.path / "quarantine").glob("*.why"))) == len(kept)

    @pytest.mark.parametrize("damaged", [1, 2])
    def test_damage_that_nobody_has_noticed_yet_is_healed(
        self, run: Trained, copies: RemoteCopies, damaged: int
    ) -> None:
        """The store has it whole: no older one is taken for a bit that flipped here."""
        run.save(1)
        run.save(2, base=1)
        copies.push(run.directory, g(2))
        files = run.files(g(1)), run.files(g(2))
        shard = run.folder(g(damaged)) / "shard-00000-a1.safetensors"
        bytes_there = bytearray(shard.read_bytes())
        bytes_there[-1] ^= 1
        shard.write_bytes(bytes_there)
        run.directory.release(run.term)
        copied, (told,) = copies.pull(str(run.path))
        assert (copied.generation, copied.bytes > 0) == (g(2), True)
        assert told.startswith(f"{g(damaged).name}: set aside")
        assert (run.files(g(1)), run.files(g(2))) == files
        (why,) = (run.path / "quarantine").glob("*.why")
        assert f"{g(damaged).name}: damaged; brought back from a copy: rank 0" in why.read_text()

    def test_what_is_damaged_here_and_there_costs_the_generation(
        self, two: Trained, copies: RemoteCopies, objects: Objects
    ) -> None:
        """It is fetched once, not for ever, and the older one is what comes back."""
        shard = two.folder(g(2)) / "shard-00000-a1.safetensors"
        rotten = bytearray(shard.read_bytes())
        rotten[-1] ^= 1
        shard.write_bytes(rotten)
        objects.write(f"{g(2).name}/{shard.name}", bytes(rotten))
        two.directory.release(two.term)
        copied, told = copies.pull(str(two.path))
        assert (copied.generation, len(told)) == (g(1), 2)

    # ----------------------------------------------------------------- damage in the store

    @pytest.mark.parametrize(
        "damage",
        ["flipped", "cut", "no shard", "no index", "index", "swapped", "foreign",
         "garbage", "empty", "huge", "escapes", "escapes by base"],
    )  # fmt: skip
    def test_damage_in_the_store_costs_the_generation_only(
        self, two: Trained, objects: Objects, tmp_path: Path, damage: str
    ) -> None:
        """The older one is brought, byte for byte; nothing outside the directory changes."""
        folder = g(2).name
        shard, index, commit = (
            f"{folder}/{name}"
            for name in ("shard-00000-a1.safetensors", "idx-00000-a1.json", "COMMIT")
        )
        data = bytearray(two.files(g(2))["shard-00000-a1.safetensors"])
        parsed = read_commit(str(two.folder(g(2)) / "COMMIT"))
        (record,) = parsed.records

        def sealed(**changes: Any) -> bytes:
            return to_json(replace(parsed, **changes).sealed()).encode()

        if damage == "flipped":
            data[CHUNK + 99] ^= 1
            objects.write(shard, bytes(data))
        elif damage == "cut":
            objects.write(shard, bytes(data[:-5000]))
        elif damage in ("no shard", "no index"):
            objects.delete(shard if damage == "no shard" else index)
        elif damage == "index":
            objects.write(index, b"{}")
        elif damage == "swapped":
            objects.write(commit, two.files(g(1))["COMMIT"])
        elif damage == "foreign":
            objects.write(commit, sealed(run_id="another"))
        elif damage in ("garbage", "empty"):
            objects.write(commit, b"\xff\x00garbage" if damage == "garbage" else b"")
        elif damage == "huge":
            objects.write(commit, bytes(MAX_RECORD_BYTES + 1))
        elif damage == "escapes":
            objects.write(commit, sealed(records=({**record, "file": "../../x"},)))
            objects.write("x", b"escaped")
        else:
            objects.write(commit, sealed(records=({**record, "base": "../../x"},)))
        if damage in ("swapped", "foreign", "garbage", "empty", "huge"):
            assert self.offered(objects) == [g(1)]
        before = everything(tmp_path)
        copies = RemoteCopies(objects)
        copied, told = copies.pull(str(tmp_path / "inner" / "there"))
        if damage == "escapes by base":  # names nobody; the bytes are all there
            assert copied.generation == g(2)
        else:
            assert copied.generation == g(1)
            assert contents(tmp_path / "inner" / "there" / g(1).name) == two.files(g(1))
            there = CheckpointDirectory(str(tmp_path / "inner" / "there"))
            assert [e.generation for e in there.catalogue(two.run_id)] == [g(1)]
        if damage in ("flipped", "cut", "no shard", "no index", "index", "escapes"):
            assert len(told) == 1
            assert g(2).name in told[0]
        if damage == "escapes":
            (why,) = (tmp_path / "inner" / "there" / "quarantine").glob("*.why")
            assert "COMMIT names '../../x', which is no shard" in why.read_text()
        changed = {
            name: data
            for name, data in everything(tmp_path).items()
            if before.get(name) != data and not name.startswith("inner/there/")
        }
        assert changed == {}
        if copied.generation == g(1):
            with pytest.raises(
                NoCheckpointError, match=r"step 2 \(term 1\)|ckpt-t0001-step-00000002"
            ):
                copies.pull(str(tmp_path / "named"), g(2))

    def test_an_object_that_is_too_long_stops_neither_push_nor_retention(
        self, two: Trained, objects: Objects
    ) -> None:
        """In the place of a COMMIT that nobody believes."""
        objects.write(f"{g(1).name}/COMMIT", bytes(MAX_RECORD_BYTES + 1))
        copies = RemoteCopies(objects)
        copies.push(two.directory, two.save(3))
        assert copies.retire(1) == [g(2)]
        assert self.offered(objects) == [g(3)]
        with pytest.raises(CorruptCheckpointError, match=r"COMMIT: .* expected a small record"):
            copies.push(two.directory, g(1))

    @pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b'{"schema_version":2}'])
    def test_garbage_in_the_place_of_run_is_told_and_goes_nowhere(
        self, two: Trained, objects: Objects, tmp_path: Path, text: bytes
    ) -> None:
        """A directory into which it was to be brought can be used once it is repaired."""
        objects.write("RUN", text)
        copies = RemoteCopies(objects)
        for ask in (
            copies.run_id,
            lambda: copies.missing(str(tmp_path / "there")),
            lambda: copies.pull(str(tmp_path / "there")),
            lambda: copies.push(two.directory, two.save(3)),
        ):
            with pytest.raises(CorruptCheckpointError, match="RUN: "):
                ask()  # type: ignore[no-untyped-call]
        assert not (tmp_path / "there" / "RUN").exists()
        objects.delete("RUN")
        with pytest.raises(NoCheckpointError, match="RUN is not there"):
            copies.pull(str(tmp_path / "there"))
        copies.push(two.directory, g(3))
        assert copies.pull(str(tmp_path / "there"))[0].generation == g(3)

    @pytest.mark.parametrize("text", [b"", b"{}", b"\xff"])
    def test_garbage_in_the_place_of_a_decision_or_a_claim_is_none(
        self, two: Trained, objects: Objects, tmp_path: Path, text: bytes
    ) -> None:
        """The commits tell the lineage; foreign names beside them are passed over."""
        two.again(g(2))
        copies = RemoteCopies(objects)
        copies.push(two.directory, two.save(1))
        for name in ("decisions/t-000002", "terms/t-000002", "terms/note", "decisions/t-2"):
            objects.write(name, text)
        assert self.offered(objects)[0] == g(1, 2)
        assert copies.pull(str(tmp_path / "there"))[0].generation == g(1, 2)
        there = CheckpointDirectory(str(tmp_path / "there"))
        assert there.claim(two.run_id, "other", 0, force=False) == 3

    # ----------------------------------------------------------------- whose it is

    def test_copies_of_another_run_are_neither_mixed_nor_brought(
        self, two: Trained, objects: Objects, tmp_path: Path
    ) -> None:
        """The store and the directory stay what they were."""
        stranger = Trained(tmp_path / "stranger")
        stranger.save(5)
        copies = RemoteCopies(objects)
        before, there = everything(stranger.path), copies.commits()
        with pytest.raises(ConfigError, match=r"holds copies of run .* name another prefix"):
            copies.push(stranger.directory, g(5))
        assert copies.commits() == there
        assert set(objects.sizes("terms")) == {"t-000001"}
        assert objects.folders() == [g(1).name, g(2).name, "terms"]
        assert copies.missing(str(stranger.path)) is None
        with pytest.raises(ConfigError, match=r"is of run .* holds copies of run"):
            copies.pull(str(stranger.path))
        assert everything(stranger.path) == before

    def test_a_generation_of_another_run_is_no_copy(
        self, two: Trained, objects: Objects, tmp_path: Path
    ) -> None:
        """Put there by hand, whole and newer: neither offered nor a reason to delete."""
        stranger = Trained(tmp_path / "stranger")
        stranger.save(9)
        for name, data in stranger.files(g(9)).items():
            objects.write(f"{g(9).name}/{name}", data)
        assert self.offered(objects) == [g(2), g(1)]
        assert RemoteCopies(objects).pull(str(tmp_path / "there"))[0].generation == g(2)
        assert RemoteCopies(objects).retire(1) == [g(1)]
        assert self.offered(objects) == [g(2)]

    def test_a_held_directory_is_not_touched(
        self, two: Trained, copies: RemoteCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A live process of this machine has claimed it."""
        copies.pull(str(tmp_path / "there"), g(1))
        there = CheckpointDirectory(str(tmp_path / "there"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", os.getppid)
            there.claim(two.run_id, "live", 0, force=False)
        before = everything(tmp_path / "there")
        with pytest.raises(DirectoryBusyError, match="owned by another live run"):
            copies.pull(str(tmp_path / "there"))
        assert everything(tmp_path / "there") == before

    @pytest.mark.parametrize("moment", ["during", "after"])
    def test_a_generation_that_retention_deletes_meanwhile_is_not_committed(
        self, two: Trained, objects: Objects, moment: str
    ) -> None:
        """During the upload of its first shard, or after the last."""
        two.save(3, ranks=2)
        two.save(4)
        sizes = [len(data) for name, data in two.files(g(3)).items() if name != "COMMIT"]
        parts = sum(-(-size // objects_module.PART_BYTES) for size in sizes)
        gate = Asked(lambda: two.directory.delete(g(3)), 0 if moment == "during" else parts - 1)
        with pytest.raises(NoCheckpointError, match="deleted"):
            RemoteCopies(objects).push(two.directory, g(3), gate)
        assert objects.read(f"{g(3).name}/COMMIT") is None
        assert self.offered(objects) == [g(2), g(1)]
        with pytest.raises(NoCheckpointError, match="is not there, or was deleted"):
            RemoteCopies(objects).push(two.directory, g(3))
