"""Point 2: copy, encode and write run at once, each on its own chunk, or one after the other."""

import threading
from pathlib import Path

import pytest

from autockpt.executors.image.codecs.zstd import ZstdCodec
from autockpt.executors.linux.memory import Arena
from autockpt.executors.storage.shard_file import ImageFile
from autockpt.policies.policy_file import load_policy
from tests.unit.executors.checkpoints import CHUNK, PATIENCE_S, Persisted, pipeline, target

CHUNKS = 6
NEVER_S = 0.3
"""What waits for all of the stage before it cannot begin, however long it is waited for."""


class Stages:
    """Slow stages: each waits for the next one to begin, so that what can overlap does."""

    def __init__(self, arena: Arena, patience_s: float) -> None:
        self.arena = arena
        self.patience_s = patience_s
        self.copied = 0
        self.encoded = 0
        self.encoding, self.writing = threading.Event(), threading.Event()
        self.looked = threading.Event()
        self.at_once: set[str] = set()
        self._lock = threading.Lock()

    def encode(self, raw: memoryview) -> bytes:
        """A codec's encode: the second chunk's lasts until a write of an earlier one began."""
        with self._lock:
            self.encoded += 1
            turn = self.encoded
        if turn == 2:
            self.encoding.set()
            writes = self.writing.wait(self.patience_s)
            copies = self.copied < self.arena.nbytes
            self.at_once = {"encode", *(["write"] * writes), *(["copy"] * copies)}
            self.looked.set()
        return bytes(raw[: len(raw) // 2])

    def write_at(self, offset: int, data: memoryview) -> None:
        """The file's write: the first one lasts until the second chunk is encoded."""
        if not self.writing.is_set():
            self.writing.set()
            assert self.looked.wait(PATIENCE_S)


@pytest.mark.parametrize("preset", ["bytecheckpoint-pipeline", "async"])
def test_copy_encode_and_write_overlap_only_in_a_pipeline(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the last chunk waits until an encode and a write are seen at the same time."""
    streaming = load_policy(f"builtin:{preset}").goal.pins.streaming
    assert streaming is (preset == "bytecheckpoint-pipeline")
    arena = Arena.anonymous(CHUNKS * CHUNK)
    result = Persisted()
    stages = Stages(arena, PATIENCE_S if streaming else NEVER_S)
    write_at = ImageFile.write_at

    def slow_write(file: ImageFile, offset: int, data: memoryview) -> None:
        stages.write_at(offset, data)
        write_at(file, offset, data)

    monkeypatch.setattr(ZstdCodec, "encode", lambda codec, raw, **_: stages.encode(raw))
    monkeypatch.setattr(ImageFile, "write_at", slow_write)
    shard = pipeline(
        arena.view, target(str(tmp_path / "shard"), codec="zstd", writers=2), result,
        available=lambda: stages.copied, streaming=streaming,
    )  # fmt: skip
    shard.start()
    stages.copied = (CHUNKS - 1) * CHUNK
    if streaming:
        assert stages.looked.wait(PATIENCE_S)
    else:
        assert not stages.encoding.wait(NEVER_S)
        assert not stages.writing.is_set()
    stages.copied = arena.nbytes
    shard.sealed()
    assert result.ended.wait(PATIENCE_S)
    shard.cancel()
    assert result.error is None
    assert stages.encoded == CHUNKS
    if streaming:
        assert stages.at_once == {"copy", "encode", "write"}
    else:
        assert "copy" not in stages.at_once


@pytest.mark.parametrize("preset", ["bytecheckpoint-pipeline", "async"])
def test_digests_are_complete_while_the_first_write_stands_still(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory tier needs the digests, and no store however slow keeps them from it."""
    arena, result, digested = Arena.anonymous(CHUNKS * CHUNK), Persisted(), threading.Event()
    on_digested, write_at = result.on_digested, ImageFile.write_at

    def write_after_digests(file: ImageFile, offset: int, data: memoryview) -> None:
        assert digested.wait(PATIENCE_S)
        write_at(file, offset, data)

    def announced(digests: tuple[str, ...]) -> None:
        on_digested(digests)
        digested.set()

    monkeypatch.setattr(ImageFile, "write_at", write_after_digests)
    monkeypatch.setattr(result, "on_digested", announced)
    shard = pipeline(
        arena.view, target(str(tmp_path / "shard"), writers=1), result,
        streaming=load_policy(f"builtin:{preset}").goal.pins.streaming,
    )  # fmt: skip
    shard.sealed()
    shard.start()
    assert result.ended.wait(2 * PATIENCE_S)
    shard.cancel()
    assert result.error is None
    assert len(result.digests) == CHUNKS
