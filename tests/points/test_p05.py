"""Point 5, streaming writes: the first byte is written before the last one is copied."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autockpt.executors.keeper import pipeline as pipelines
from autockpt.executors.keeper.pipeline import PersistTarget, ShardOutcome, ShardPipeline
from autockpt.executors.memory import Arena

CHUNK = 2**16
CHUNKS = 8
PATIENCE_S = 30.0


class Shard:
    """A pipeline over an image whose copied prefix the test decides."""

    def __init__(self, folder: Path, *, streaming: bool) -> None:
        self.image = Arena.anonymous(CHUNK * CHUNKS)
        self.copied = 0
        self.written: list[int] = []
        self.ended = threading.Event()
        self.outcomes: list[ShardOutcome] = []
        self.path = folder / "shard.safetensors"
        self.pipeline = ShardPipeline(
            self.image.view, chunk_bytes=CHUNK, available=lambda: self.copied,
            streaming=streaming, known=None,
            target=PersistTarget(
                path=str(self.path), prepare=lambda: None, writers=2, direct_io=True,
                codec="none", codec_ranges=(),
            ),
            on_digested=lambda digests: None, on_persisted=self._persisted,
            on_failed=lambda error: self.ended.set(),
        )  # fmt: skip

    def _persisted(self, outcome: ShardOutcome) -> None:
        self.outcomes.append(outcome)
        self.ended.set()

    def copy(self, chunk: int) -> None:
        """The trainer's next piece."""
        start = chunk * CHUNK
        self.image.view[start : start + CHUNK] = bytes([chunk + 1]) * CHUNK
        self.copied = start + CHUNK


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], Shard]]:
    """Makes a running Shard whose writes are noted."""
    made: list[Shard] = []
    write_at = pipelines.ImageFile.write_at

    def noted(file: pipelines.ImageFile, offset: int, data: memoryview) -> None:
        write_at(file, offset, data)
        made[0].written.append(offset)

    monkeypatch.setattr(pipelines.ImageFile, "write_at", noted)

    def make(streaming: bool) -> Shard:
        made.append(Shard(tmp_path, streaming=streaming))
        made[0].pipeline.start()
        return made[0]

    yield make
    made[0].pipeline.cancel()


def until(done: Callable[[], bool], what: str) -> None:
    """Polls with a deadline."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def finish(shard: Shard) -> None:
    """Copies what is missing, seals, and reads the file back."""
    for chunk in range(shard.copied // CHUNK, CHUNKS):
        shard.copy(chunk)
    shard.pipeline.sealed()
    assert shard.ended.wait(PATIENCE_S)
    assert shard.outcomes[0].stored_bytes == CHUNK * CHUNKS
    assert shard.path.read_bytes() == bytes(shard.image.view)


def test_with_streaming_chunks_are_written_while_others_are_not_copied_yet(
    shard: Callable[[bool], Shard],
) -> None:
    """Each chunk goes out as soon as it is there, the header's chunk last."""
    it = shard(True)
    for chunk in range(CHUNKS - 1):
        it.copy(chunk)
        until(lambda n=chunk: len(it.written) >= n, f"chunk {chunk} is not written")  # type: ignore[misc]
    assert it.copied < CHUNK * CHUNKS
    assert 0 not in it.written
    finish(it)
    assert it.written[-1] == 0


def test_without_streaming_nothing_is_written_before_the_last_byte_is_copied(
    shard: Callable[[bool], Shard],
) -> None:
    """Not a byte, however long it takes."""
    it = shard(False)
    for chunk in range(CHUNKS):
        it.copy(chunk)
        deadline = time.monotonic() + 0.02
        while time.monotonic() < deadline:
            assert not it.written
    finish(it)
