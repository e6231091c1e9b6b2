"""Retired shard files are written over: only when nobody else has them, never half believed."""

import errno
import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors import safe_open

from autockpt.executors.keeper.server import Keeper
from autockpt.executors.linux.memory import PAGE_BYTES, Arena
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage import file_reuse as spares
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.removal import GOING
from autockpt.executors.storage.file_reuse import KEPT_PER_RANK, ReusableFiles
from autockpt.executors.storage.shard_file import ImageFile
from autockpt.values.errors import StorageError
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import (
    CHUNK,
    PATIENCE_S,
    Persisted,
    commit_images,
    persist,
    target,
)
from tests.unit.executors.checkpoints import pipeline as start_pipeline
from tests.unit.executors.states import Module, random_tensor, snapshot


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever disk the tests run on."""
    monkeypatch.setattr(spares, "is_tight", lambda path: False)


MARK = 0o640
"""Mode of no file that we create."""
G1, G2 = Generation(term=1, step=1), Generation(term=1, step=2)


def image_of(nbytes: int, seed: int) -> memoryview:
    """An image of one tensor of so many bytes."""
    state = LiveState.of(model=Module([("w", random_tensor("uint8", (nbytes,), seed))]))
    arena, shooter = snapshot(state)
    shooter.close()
    assert shooter.layout is not None
    return arena.view[: shooter.layout.image_bytes]


def opens(path: Path) -> bool:
    """Whether another reader takes the file for an image."""
    try:
        with safe_open(path, framework="pt") as file:
            return "model.w" in file.keys()  # noqa: SIM118
    except Exception:
        return False


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A shard file that nobody needs any more."""
    path = tmp_path / "old"
    persist(image_of(5 * CHUNK, 1), str(path))
    assert opens(path)
    return marked(path)


def marked(path: Path) -> Path:
    """A file that is known again whatever it is called; inode numbers are given out twice."""
    path.chmod(MARK)
    return path


def is_marked(path: Path) -> bool:
    return path.stat().st_mode & 0o777 == MARK


# --- taking a file over --------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("nbytes", [CHUNK, 5 * CHUNK, 11 * CHUNK + 5], ids=["less", "same", "more"])
def test_the_blocks_of_a_retired_file_hold_the_next_image(
    old: Path, tmp_path: Path, direct: bool, codec: str, nbytes: int
) -> None:
    """The same file under the new name, and not a byte of the old image behind the new one."""
    new, fresh = tmp_path / "new", tmp_path / "fresh"
    image = image_of(nbytes, 2)
    result = persist(image, str(new), codec, direct_io=direct, spare=lambda: str(old))
    persist(image, str(fresh), codec, direct_io=direct, writers=1)
    assert (result.error, is_marked(new), old.exists()) == (None, True, False)
    assert not is_marked(fresh)
    assert result.outcome is not None
    assert new.stat().st_size == result.outcome.stored_bytes
    if codec == "none":
        assert new.read_bytes() == fresh.read_bytes() == image


HOLDER = """
import hashlib, mmap, os, sys
fd = os.open(sys.argv[2], os.O_RDONLY)
if sys.argv[1] == "mapped":
    kept = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    os.close(fd)
else:
    kept = open(fd, "rb")
print("ready", flush=True)
sys.stdin.read()
print(hashlib.sha256(kept.read()).hexdigest())
"""


@contextmanager
def held_by_somebody(how: str, path: Path, read: list[str]) -> Iterator[None]:
    """Another process has the file; at the end it adds the digest of what it reads there."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", HOLDER, how, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        read.append(process.communicate("", timeout=PATIENCE_S)[0].strip())


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_file_that_another_process_has_is_not_written(
    old: Path, tmp_path: Path, how: str, direct: bool
) -> None:
    """Somebody evaluates the old checkpoint: it keeps every byte, the new image gets a new file."""
    before, new = hashlib.sha256(old.read_bytes()).hexdigest(), tmp_path / "new"
    read: list[str] = []
    image = image_of(5 * CHUNK, 2)
    with held_by_somebody(how, old, read):
        result = persist(image, str(new), direct_io=direct, spare=lambda: str(old))
    assert result.error is None
    assert new.read_bytes() == image
    assert read == [before]
    assert not is_marked(new)
    assert not old.exists()


def second_name(old: Path, tmp_path: Path) -> Path:
    """A hard link: somebody archives checkpoints that way."""
    os.link(old, tmp_path / "archive")
    return tmp_path / "archive"


def symbolic(old: Path, tmp_path: Path) -> Path:
    """The retired name only points at the file."""
    old.rename(tmp_path / "elsewhere")
    old.symlink_to(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("make", [second_name, symbolic])
def test_a_file_with_another_name_is_not_written(
    old: Path, tmp_path: Path, make: Callable[[Path, Path], Path], direct: bool
) -> None:
    """Under that name it stays what it was."""
    before, other = old.read_bytes(), make(old, tmp_path)
    image = image_of(5 * CHUNK, 2)
    new = tmp_path / "new"
    result = persist(image, str(new), direct_io=direct, spare=lambda: str(old))
    assert result.error is None
    assert new.read_bytes() == image
    assert not new.is_symlink()
    assert other.read_bytes() == before
    assert is_marked(other)
    assert not is_marked(new)


@pytest.mark.parametrize("direct", [True, False])
def test_what_stands_under_the_new_name_is_never_replaced(
    old: Path, tmp_path: Path, direct: bool
) -> None:
    """An attempt of an earlier incarnation: refused as without a spare file."""
    new = tmp_path / "new"
    new.write_bytes(b"somebody's")
    result = persist(image_of(CHUNK, 2), str(new), direct_io=direct, spare=lambda: str(old))
    assert isinstance(result.error, StorageError)
    assert new.read_bytes() == b"somebody's"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: None])
def test_what_is_no_file_is_no_spare_file(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """A folder, a pipe without a reader, nothing: a new file, and no hang."""
    strange, new = tmp_path / "strange", tmp_path / "new"
    make(strange)
    image = image_of(CHUNK, 2)
    assert persist(image, str(new), spare=lambda: str(strange)).error is None
    assert new.read_bytes() == image


# --- half written --------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_the_old_header_is_gone_before_anything_else_is_written(
    old: Path, tmp_path: Path, direct: bool
) -> None:
    """Whoever finds the file from now on does not take it for either image."""
    new = tmp_path / "new"
    file = ImageFile(str(new), allocate_bytes=5 * CHUNK, direct=direct, reuse=str(old))
    assert new.read_bytes()[:PAGE_BYTES] == bytes(PAGE_BYTES)
    assert not opens(new)
    page = Arena.anonymous(PAGE_BYTES)
    page.view[:] = b"\1" * PAGE_BYTES
    file.write_at(3 * PAGE_BYTES, page.view)
    assert not opens(new)
    file.discard()
    assert not new.exists()


@pytest.mark.parametrize("cut", [0, 1, 2, 4])
def test_a_file_cut_short_is_no_image(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """Death after any number of chunks; the old header is not back, the new one not yet there."""
    real, new, written = os.pwrite, tmp_path / "new", []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if offset >= PAGE_BYTES:
            written.append(offset)
        if len(written) > cut:
            raise OSError(errno.EIO, "the power is gone")
        return real(fd, data, offset)

    seen: list[bool] = []
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(ImageFile, "discard", lambda file: seen.append(opens(Path(file.path))))
    result = persist(image_of(5 * CHUNK, 2), str(new), writers=1, spare=lambda: str(old))
    assert isinstance(result.error, StorageError)
    assert seen[0] is False
    assert not opens(new)
    assert new.exists()


def test_a_full_disk_takes_the_spare_file_with_it(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger image does not fit: nothing is left under either name."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("autockpt.executors.storage.shard_file.fallocate", full)
    new = tmp_path / "new"
    result = persist(image_of(11 * CHUNK, 2), str(new), spare=lambda: str(old))
    assert "free space" in str(result.error)
    assert not new.exists()
    assert not old.exists()


def test_a_cancelled_shard_leaves_neither_file(old: Path, tmp_path: Path) -> None:
    """Withdrawn before it was sealed."""
    result, new, image = Persisted(), tmp_path / "new", image_of(5 * CHUNK, 2)
    one = start_pipeline(image, target(str(new), spare=lambda: str(old)), result)
    one.start()
    one.cancel()
    one.join()
    assert not new.exists()
    assert result.outcome is None


# --- the pool ------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    """Opened and claimed."""
    made = CheckpointDirectory(str(tmp_path / "checkpoints"))
    made.claim(made.open(), "launch", 0, force=False)
    return made


def in_pool(directory: CheckpointDirectory) -> list[str]:
    """Names in spare/."""
    folder = Path(directory.path) / "spare"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def committed(directory: CheckpointDirectory, step: int, ranks: int = 1) -> Generation:
    """A generation of small images."""
    generation = Generation(term=1, step=step)
    images = [image_of(CHUNK, step + rank) for rank in range(ranks)]
    commit_images(directory, directory.open(), generation, images, step=step)
    return generation


def test_a_shard_becomes_spare_only_after_its_commit_is_durably_gone(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order a crash leaves a whole generation or trash, no COMMIT without its shard."""
    folder = directory.generation_path(committed(directory, 1, ranks=2))
    calls: list[tuple[str, str]] = []
    names: dict[int, str] = {}

    def record(name: str) -> None:
        real = getattr(os, name)

        def call(first: Any, *rest: Any, **more: Any) -> Any:
            calls.append((name, names.get(first, "") if name == "fsync" else str(first)))
            result = real(first, *rest, **more)
            if name == "open":
                names[result] = str(first)
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("open", "unlink", "fsync", "rename"):
        record(name)
    directory.delete(G1)
    monkeypatch.undo()
    ours = [call for call in calls if call[0] != "open"]
    commit = ours.index(("unlink", os.path.join(folder, GOING)))
    moved = [i for i, (name, path) in enumerate(ours) if name == "rename" and "shard-" in path]
    assert ours[commit + 1] == ("fsync", folder)
    assert len(moved) == 2
    assert min(moved) > commit + 1
    assert [name[:7] for name in in_pool(directory)] == ["r00000-", "r00001-"]
    assert not os.path.exists(folder)


def test_each_rank_has_a_few_spare_files_and_no_more(directory: CheckpointDirectory) -> None:
    """Space that was freed is free: the third one is removed."""
    for step in range(1, KEPT_PER_RANK + 3):
        directory.delete(committed(directory, step, ranks=2))
    pool = in_pool(directory)
    assert len(pool) == 2 * KEPT_PER_RANK
    for rank in range(2):
        for _ in range(KEPT_PER_RANK):
            path = directory.spares.take(rank)
            assert path is not None
            assert opens(Path(path))
        assert directory.spares.take(rank) is None


def test_a_nearly_full_disk_keeps_no_spare_files(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the disk stays for checkpoints; of a disk that says nothing, all of it."""
    monkeypatch.undo()
    real, share = os.statvfs, 0.09
    monkeypatch.setattr(
        os, "statvfs", lambda path: Room(int(real(path).f_blocks * share), real(path).f_blocks)
    )
    directory.delete(committed(directory, 1))
    assert in_pool(directory) == []
    share = 0.11
    directory.delete(committed(directory, 2))
    assert len(in_pool(directory)) == 1
    monkeypatch.setattr(os, "statvfs", real)
    assert spares.is_tight(os.path.join(directory.path, "gone"))


class Room(NamedTuple):
    """What of statvfs is asked for."""

    f_bavail: int
    f_blocks: int


def test_a_retired_generation_is_written_over_by_the_next(directory: CheckpointDirectory) -> None:
    """From the directory to the pool to the next shard: one file all the way."""
    folder = Path(directory.generation_path(committed(directory, 1)))
    marked(folder / "shard-00000-a1.safetensors")
    directory.delete(G1)
    new = Path(directory.create_generation(G2)) / "shard-00000-a1.safetensors"
    image = image_of(3 * CHUNK, 9)
    persist(image, str(new), spare=lambda: directory.spares.take(0))
    assert is_marked(new)
    assert new.read_bytes() == image
    assert in_pool(directory) == []


def test_two_takers_never_get_the_same_file(directory: CheckpointDirectory) -> None:
    """Threads of one keeper, keepers of several nodes: whose rename comes first."""
    folder = Path(directory.path) / "spare"
    folder.mkdir()
    for i in range(40):
        (folder / f"r00000-{i:012x}").touch()
    start = threading.Barrier(4)
    taken: list[list[str]] = [[] for _ in range(4)]

    def take(mine: list[str]) -> None:
        spares = ReusableFiles(directory.path)
        start.wait(PATIENCE_S)
        while (path := spares.take(0)) is not None or any(folder.glob("r00000-*")):
            if path is not None:
                mine.append(path)

    threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    everything = [path for mine in taken for path in mine]
    assert len(everything) == len(set(everything)) == 40
    assert all(os.path.exists(path) for path in everything)


def test_a_pool_that_cannot_be_used_is_no_error(directory: CheckpointDirectory) -> None:
    """A file in its place, a shard that is gone: shards are removed as if there were none."""
    (Path(directory.path) / "spare").write_bytes(b"")
    assert not directory.spares.keep(0, os.path.join(directory.path, "none"))
    assert directory.spares.take(0) is None
    folder = directory.generation_path(committed(directory, 1))
    assert directory.delete(G1) > CHUNK
    assert not os.path.exists(folder)


def test_a_keeper_begins_and_ends_without_spare_files(tmp_path: Path) -> None:
    """What a killed one left is freed, and after a run only checkpoints take up space."""
    run, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    run.mkdir()
    pool = checkpoints / "spare"
    pool.mkdir(parents=True)
    (pool / "r00000-0123456789ab").touch()
    keeper = Keeper(str(run), 0, str(checkpoints))
    assert not pool.exists()
    pool.mkdir()
    (pool / "r00000-0123456789ac").touch()
    keeper._leave_when_drained = True
    ours, theirs = socket.socketpair()
    with ours, theirs:
        keeper.serve(ours)
    assert not pool.exists()


def test_after_a_failed_write_the_pool_is_given_back(tmp_path: Path) -> None:
    """It may have been a full disk: the second attempt gets the room and a file of its own."""
    run, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    run.mkdir()
    keeper = Keeper(str(run), 0, str(checkpoints))
    pool = checkpoints / "spare"
    pool.mkdir()
    for name in ("r00000-00000000000a", "r00000-00000000000b", "r00001-00000000000a"):
        (pool / name).touch()
    first = keeper._shards._spare(0, 1)
    assert first is not None
    assert Path(first).exists()
    assert keeper._shards._spare(0, 2) is None
    assert not pool.exists()
    assert keeper._shards._spare(0, 1) is None
    keeper._leave_when_drained = True
    ours, theirs = socket.socketpair()
    with ours, theirs:
        keeper.serve(ours)
