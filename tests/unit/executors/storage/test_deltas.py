"""Generations stored as differences: read back whole, refused when a base is not what it was."""

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autockpt.executors.image.container import ImageIndex, read_index
from autockpt.executors.image.layout.runs import Kind
from autockpt.executors.keeper.saving.delta_bases import Base, Bases
from autockpt.executors.linux.memory import Arena
from autockpt.executors.storage.catalogue import MOST_BASES, open_shard, verify_generation
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import read_commit
from autockpt.values.errors import CorruptCheckpointError
from autockpt.values.generation import Generation
from autockpt.values.record import to_json
from tests.unit.executors.checkpoints import CHUNK, PATIENCE_S, commit_images

FLOATS = ((0, 4 * CHUNK, Kind(4, True, True).code, 0),)
"""The last chunk is of a class that is not encoded."""


def g(step: int) -> Generation:
    """One generation."""
    return Generation(term=1, step=step)


def image(steps: int) -> memoryview:
    """Weights after some steps: the first two of five chunks move, the others stay."""
    arena = Arena.anonymous(5 * CHUNK)
    values = np.frombuffer(arena.view, np.float32)
    draw = np.random.default_rng(0)
    values[:] = draw.standard_normal(len(values)) * 0.02
    for _ in range(steps):
        values[: CHUNK // 2] *= 1 + 1e-5 * draw.standard_normal(CHUNK // 2)
    return arena.view


class Chain:
    """A directory with a plain generation and some that are differences to the one before."""

    def __init__(self, path: Path) -> None:
        self.directory = CheckpointDirectory(str(path / "checkpoints"))
        self.run_id = self.directory.open()
        self.directory.claim(self.run_id, "launch", 0, force=False)

    def folder(self, step: int) -> Path:
        """Where a generation stands."""
        return Path(self.directory.generation_path(g(step)))

    def index(self, step: int) -> ImageIndex:
        """Of its one shard."""
        return read_index((self.folder(step) / "idx-00000-a1.json").read_bytes(), where="index")

    def save(self, step: int, base: int | None, *, codec: str = "planes") -> None:
        """Commits `image(step)`."""
        against = None if base is None else Base(image(base), self.index(base), bases=0)
        commit_images(
            self.directory, self.run_id, g(step), [image(step)], codec=codec, layouts=["layout"],
            codec_ranges=FLOATS if codec != "none" else (), base=against,
        )  # fmt: skip

    def open(self, step: int) -> Any:
        """Its shard, with its bases."""
        folder = str(self.folder(step))
        commit = read_commit(f"{folder}/COMMIT")
        return open_shard(folder, commit.records[0], commit)

    def read(self, step: int) -> bytes:
        """All of it."""
        source = self.open(step)
        buffer = Arena.anonymous(source.room_bytes)
        data = b"".join(bytes(source.read(i, buffer.view)) for i in range(5))
        source.close()
        buffer.close()
        return data


@pytest.fixture(params=["none", "planes"])
def chain(request: pytest.FixtureRequest, tmp_path: Path) -> Chain:
    """Three in a row; the first one as it is, or encoded."""
    made = Chain(tmp_path)
    made.save(1, None, codec=request.param)
    made.save(2, 1)
    made.save(3, 2)
    return made


def test_every_generation_of_a_chain_is_read_back_whole(chain: Chain) -> None:
    """And verifies; what moved is small, what stayed is not stored again."""
    for step in (1, 2, 3):
        assert chain.read(step) == image(step)
        assert verify_generation(chain.directory.path, g(step).name).ok
    stored = chain.index(3).stored
    assert [chunk.length for chunk in stored[2:]] == [0, 0, 0]
    assert all(chunk.base and 0 < chunk.length < 0.8 * CHUNK for chunk in stored[:2])
    assert chain.index(3).base == g(2)
    assert read_commit(f"{chain.folder(3)}/COMMIT").records[0]["base"] == g(2).name


def test_a_missing_base_is_named(chain: Chain) -> None:
    """Both who needs it and what it is."""
    shutil.rmtree(chain.folder(1))
    for step in (2, 3):
        with pytest.raises(
            CorruptCheckpointError, match=r"difference to step 1 \(term 1\).* has no COMMIT"
        ):
            chain.open(step)
        result = verify_generation(chain.directory.path, g(step).name)
        assert result.damaged
        assert "step 1 (term 1)" in result.problems[0]


def test_a_damaged_base_damages_what_needs_it(chain: Chain) -> None:
    """The message names the file that is damaged."""
    shard = chain.folder(1) / "shard-00000-a1.safetensors"
    data = bytearray(shard.read_bytes())
    place = chain.index(1).stored[0].offset + 9 if chain.index(1).stored else 9
    data[place] ^= 1
    shard.write_bytes(data)
    result = verify_generation(chain.directory.path, g(3).name)
    assert result.damaged
    assert g(1).name in result.problems[0]


def test_another_generation_in_the_place_of_the_base_is_refused(chain: Chain) -> None:
    """Whole, sound, of the same run and size: and not the one."""
    chain.save(4, None, codec="planes")
    commit = read_commit(f"{chain.folder(4)}/COMMIT")
    wrong = replace(commit, generation=g(1)).sealed()
    for name in ("shard-00000-a1.safetensors", "idx-00000-a1.json"):
        shutil.copy(chain.folder(4) / name, chain.folder(1) / name)
    (chain.folder(1) / "COMMIT").write_text(to_json(wrong))
    with pytest.raises(CorruptCheckpointError, match=r"its root is|belongs to step 4 \(term 1\)"):
        chain.open(2)


def test_a_base_with_other_bytes_is_refused_chunk_by_chunk(chain: Chain) -> None:
    """The digest of the base's chunk stands beside every difference."""
    path = chain.folder(2) / "idx-00000-a1.json"
    data = json.loads(path.read_text())
    data["stored"][0]["base"] = "0" * 32
    path.write_text(json.dumps(data))
    source = chain.open(2)
    with pytest.raises(CorruptCheckpointError, match="chunk 0 needs the base of digest 0000"):
        source.read(0, Arena.anonymous(source.room_bytes).view)
    source.close()


@pytest.mark.parametrize("named", [g(2), g(9)])
def test_an_index_cannot_name_itself_or_a_later_one(chain: Chain, named: Generation) -> None:
    """No reader goes round in circles."""
    path = chain.folder(2) / "idx-00000-a1.json"
    data = json.loads(path.read_text()) | {"base": {"term": named.term, "step": named.step}}
    path.write_text(json.dumps(data))
    with pytest.raises(CorruptCheckpointError, match="is no older generation"):
        chain.open(2)


def test_differences_without_a_base_are_refused(chain: Chain) -> None:
    """An index that hides it."""
    path = chain.folder(2) / "idx-00000-a1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base": None}))
    with pytest.raises(CorruptCheckpointError, match="need a base and none is named"):
        chain.open(2)


def test_a_cut_difference_is_refused(chain: Chain) -> None:
    """Truncated by a page."""
    shard = chain.folder(3) / "shard-00000-a1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5000])
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        chain.open(3)


def test_a_chain_without_end_is_refused(tmp_path: Path) -> None:
    """Nobody writes one; each link would cost a file descriptor and a chunk of memory."""
    made = Chain(tmp_path)
    made.save(1, None)
    for step in range(2, MOST_BASES + 3):
        made.save(step, step - 1)
    assert made.read(MOST_BASES + 1) == image(MOST_BASES + 1)
    with pytest.raises(CorruptCheckpointError, match="in a row"):
        made.open(MOST_BASES + 2)


# --- in the keeper


def test_a_slot_is_given_back_when_its_chunk_is_done(chain: Chain) -> None:
    """Borrowed chunks are waited for; afterwards there are none."""
    base = Base(image(1), chain.index(1), bases=0)
    gone = threading.Event()
    with base.chunk(0) as data:
        assert data == image(1)[:CHUNK]
        thread = threading.Thread(target=lambda: (base.let_go(), gone.set()))
        thread.start()
        assert not gone.wait(0.05)
        with base.chunk(1) as late:
            assert late is None
    assert gone.wait(PATIENCE_S)
    thread.join()


def test_a_save_whose_base_goes_away_stands_alone(tmp_path: Path) -> None:
    """It is whole, and names no base."""
    made = Chain(tmp_path)
    made.save(1, None)
    base = Base(image(1), made.index(1), bases=0)
    base.let_go()
    commit_images(
        made.directory, made.run_id, g(2), [image(2)], codec="planes", layouts=["layout"],
        codec_ranges=FLOATS, base=base,
    )  # fmt: skip
    shutil.rmtree(made.folder(1))
    assert made.read(2) == image(2)


def test_bases_are_the_newest_and_never_too_far_from_a_whole_one(chain: Chain) -> None:
    """Of the same run, size and chunks; and none after its slot was taken."""
    bases, newest = Bases(), Base(image(2), chain.index(2), bases=1)
    bases.add(newest)
    bases.add(Base(image(1), chain.index(1), bases=0))
    asked = {"run_id": chain.run_id, "image_bytes": 5 * CHUNK, "chunk_bytes": CHUNK, "longest": 2}
    assert bases.for_save(0, g(3), **asked) is newest
    assert bases.for_save(1, g(3), **asked) is None
    others = {"run_id": "", "image_bytes": CHUNK, "chunk_bytes": 2 * CHUNK, "longest": 1}
    for name, other in others.items():
        assert bases.for_save(0, g(3), **asked | {name: other}) is None
    for later in (g(1), g(2)):  # written after the newest one, at a breakpoint
        assert bases.for_save(0, later, **asked) is None
    bases.drop(newest)
    assert bases.for_save(0, g(3), **asked) is None
