"""What people and the scrub see of a directory: listed, verified, and damage named."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.executors.linux.memory import Arena
from autockpt.executors.storage.catalogue import list_generations, load_index, verify_generation
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import read_commit
from autockpt.executors.storage.places.file_system import FileSystem
from autockpt.values.errors import AutockptError, CorruptCheckpointError
from autockpt.values.generation import Generation
from autockpt.values.record import to_json
from tests.contracts.faults import open_descriptors
from tests.unit.executors.checkpoints import CHUNK, commit_images

G1, G2 = Generation(term=1, step=1), Generation(term=1, step=2)


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    """Two generations of two ranks, the second one encoded."""
    made = CheckpointDirectory(str(tmp_path / "checkpoints"))
    run_id = made.open()
    made.claim(run_id, "launch", 0, force=False)
    images = []
    for rank in range(2):
        arena = Arena.anonymous(3 * CHUNK + 4096)
        arena.view[:] = bytes([rank + 1]) * arena.nbytes
        images.append(arena.view)
    commit_images(made, run_id, G1, images)
    commit_images(made, run_id, G2, images, codec="zstd", parent=G1, step=9)
    return made


def folder_of(directory: CheckpointDirectory, generation: Generation) -> Path:
    """Where it stands."""
    return Path(directory.generation_path(generation))


def flip(path: Path, place: int) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


class Counting:
    """A gate that counts what passes."""

    longest_wait_s = 0.0

    def __init__(self) -> None:
        self.asked: list[int] = []

    def wait(self, nbytes: int) -> float:
        self.asked.append(nbytes)
        return 0.0


@pytest.mark.parametrize("generation", [G1, G2])
def test_a_whole_generation_verifies(
    directory: CheckpointDirectory, generation: Generation
) -> None:
    """Plain and encoded; every chunk asks the gate first; nothing stays open."""
    gate, before = Counting(), open_descriptors()
    result = verify_generation(directory.path, generation.name, gate=gate)
    assert (result.ok, result.problems, result.shards, result.damaged) == (True, (), 2, False)
    assert result.bytes == sum(gate.asked) == 2 * (3 * CHUNK + 4096)
    assert max(gate.asked) == CHUNK
    assert open_descriptors() <= before


@pytest.mark.parametrize("generation", [G1, G2])
def test_a_damaged_chunk_is_named_and_the_others_are_read_all_the_same(
    directory: CheckpointDirectory, generation: Generation
) -> None:
    """Rank, chunk, expected and got."""
    shard = folder_of(directory, generation) / "shard-00001-a1.safetensors"
    place = CHUNK + 77
    if generation == G2:
        index = json.loads((folder_of(directory, G2) / "idx-00001-a1.json").read_text())
        place = index["stored"][1]["offset"] + index["stored"][1]["length"] - 3
    flip(shard, place)
    result = verify_generation(directory.path, generation.name)
    assert (result.ok, result.damaged, len(result.problems)) == (False, True, 1)
    assert "rank 1" in result.problems[0]
    assert "chunk 1" in result.problems[0]
    assert result.bytes == 2 * (3 * CHUNK + 4096) - CHUNK


@pytest.mark.parametrize("generation", [G1, G2])
def test_a_changed_index_is_named(directory: CheckpointDirectory, generation: Generation) -> None:
    """Whatever was changed in it: its root no longer is the one in COMMIT."""
    path = folder_of(directory, generation) / "idx-00000-a1.json"
    text = path.read_text()
    for old, new in (
        ('"rank":0', '"rank":1'),
        ('"term":1', '"term":2'),
        ('"world_size":2', '"world_size":3'),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        result = verify_generation(directory.path, generation.name)
        assert result.damaged
        assert "its root is" in result.problems[0]


def test_shards_of_two_ranks_cannot_be_swapped(directory: CheckpointDirectory) -> None:
    """Neither the files nor the indices nor both."""
    folder = folder_of(directory, G1)
    for kind in ("shard-{}-a1.safetensors", "idx-{}-a1.json"):
        one, two = folder / kind.format("00000"), folder / kind.format("00001")
        one.rename(folder / "x")
        two.rename(one)
        (folder / "x").rename(two)
        result = verify_generation(directory.path, G1.name)
        assert result.damaged
        assert len(result.problems) >= 2


@pytest.mark.parametrize("name", ["shard-00000-a1.safetensors", "idx-00000-a1.json"])
def test_a_missing_file_is_named(directory: CheckpointDirectory, name: str) -> None:
    """The other rank is read all the same."""
    (folder_of(directory, G1) / name).unlink()
    result = verify_generation(directory.path, G1.name)
    assert not result.ok
    assert name in result.problems[0]
    assert result.bytes == 3 * CHUNK + 4096


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "", ".hidden", "x" * 200])
@pytest.mark.parametrize("key", ["file", "index"])
def test_a_commit_cannot_name_files_elsewhere(
    directory: CheckpointDirectory, key: str, name: str
) -> None:
    """Its own digest is right: names are checked all the same."""
    path = folder_of(directory, G1) / "COMMIT"
    commit = read_commit(str(path))
    records = ({**commit.records[0], key: name}, commit.records[1])
    path.write_text(to_json(replace(commit, records=records).sealed()))
    result = verify_generation(directory.path, G1.name)
    assert result.damaged
    assert "is no shard or index name" in result.problems[0]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "huge"])
def test_an_index_that_is_no_small_file_is_refused(
    directory: CheckpointDirectory, kind: str, tmp_path: Path
) -> None:
    """Nothing hangs, nothing is followed, 64 GiB are not read."""
    folder = folder_of(directory, G1)
    path = folder / "idx-00000-a1.json"
    moved = path.rename(tmp_path / "moved")
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(2**36)
    commit = read_commit(str(folder / "COMMIT"))
    with pytest.raises(CorruptCheckpointError, match="idx-00000"):
        load_index(str(folder), commit.records[0], commit)


def test_storage_that_does_not_answer_is_no_damage(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO on a network file system must not condemn a checkpoint."""

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    result = verify_generation(directory.path, G1.name)
    assert not result.ok
    assert not result.damaged


def test_generations_are_listed_with_their_state(directory: CheckpointDirectory) -> None:
    """Committed, verified, corrupt, incomplete, unreadable; foreign names are not listed."""
    names = [Generation(term=1, step=s) for s in (3, 4, 5)]
    run_id = directory.open()
    for generation in names[:2]:
        commit_images(directory, run_id, generation, [Arena.anonymous(4096).view])
    directory.create_generation(names[2])
    directory.mark(G2, "VERIFIED")
    directory.mark(names[0], "CORRUPT")
    flip(folder_of(directory, names[1]) / "COMMIT", 50)
    (Path(directory.path) / "ckpt-mine").mkdir()
    records = list_generations(directory.path)
    assert [record.state for record in records] == [
        "committed", "verified", "corrupt", "unreadable", "incomplete",
    ]  # fmt: skip
    assert (records[1].parent, records[1].step, records[1].world_size) == (G1.name, 9, 2)
    shards = folder_of(directory, G1).glob("shard-*")
    assert records[0].bytes == sum(file.stat().st_size for file in shards)


def test_folders_of_many_shards_are_looked_at_little(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start lists none of them; a deletion asks for the size of each file once."""
    listed: list[str] = []
    measured: list[str] = []
    names, sizes = FileSystem.names, FileSystem.sizes

    def listing(self: FileSystem, folder: str) -> list[str]:
        listed.append(folder)
        return names(self, folder)

    def measuring(self: FileSystem, folder: str) -> dict[str, int]:
        measured.append(folder)
        return sizes(self, folder)

    monkeypatch.setattr(FileSystem, "names", listing)
    monkeypatch.setattr(FileSystem, "sizes", measuring)
    list_generations(directory.path)
    assert listed == [directory.path]
    assert directory.delete(G1) > 0
    assert measured == [directory.generation_path(G1)]
    assert not folder_of(directory, G1).exists()


def test_a_directory_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    """Not an empty list."""
    with pytest.raises(AutockptError, match="nowhere: cannot be read"):
        list_generations(str(tmp_path / "nowhere"))


def test_an_index_that_names_an_unknown_codec_is_damage(directory: CheckpointDirectory) -> None:
    """Found by the corruption campaign: it was taken for a mistake in the configuration."""
    path = folder_of(directory, G2) / "idx-00000-a1.json"
    path.write_text(path.read_text().replace('"codec":"zstd"', '"codec":"zsud"'))
    result = verify_generation(directory.path, G2.name)
    assert result.damaged
    assert "idx" in result.problems[0] or "shard-00000-a1" in result.problems[0]
    assert "unknown codec 'zsud'" in result.problems[0]


def test_an_index_that_cannot_be_read_now_is_no_damage(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the errno campaign: one EIO while it was read back condemned a good checkpoint."""
    real = os.read

    def fail(fd: int, size: int) -> bytes:
        if "idx-00000" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(5, "Input/output error")
        return real(fd, size)

    monkeypatch.setattr(os, "read", fail)
    result = verify_generation(directory.path, G1.name)
    assert not result.ok
    assert not result.damaged
