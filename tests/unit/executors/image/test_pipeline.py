"""One shard on its way: streamed, encoded, cancelled, failed; read back by strangers and by us."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from autockpt.executors.image.container import ImageIndex, chunk_digest
from autockpt.executors.keeper.saving import shard_writer as pipelines
from autockpt.executors.linux.memory import Arena
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.catalogue import ShardFileSource
from autockpt.values.errors import CorruptCheckpointError, StorageError
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import (
    CHUNK,
    PATIENCE_S,
    Persisted,
    index_of,
    persist,
    pipeline,
    target,
)
from tests.unit.executors.states import Holder, Module, bytes_of, snapshot

G = Generation(term=1, step=1)


@pytest.fixture
def state() -> LiveState:
    """Half of it shrinks, half does not; many chunks, the last one short."""
    torch.manual_seed(1)
    model = Module([("noise", torch.randn(70_000)), ("zeros", torch.zeros(90_001))])
    return LiveState.of(model=model, other=Holder({"b": torch.arange(7)}))


@pytest.fixture
def image(state: LiveState) -> memoryview:
    """Its image in memory."""
    arena, shooter = snapshot(state)
    shooter.close()
    assert shooter.layout is not None
    return arena.view[: shooter.layout.image_bytes]


def read_all(source: ShardFileSource) -> bytes:
    """Every chunk, verified, through one buffer."""
    buffer = Arena.anonymous(source.room_bytes)
    data = b"".join(bytes(source.read(i, buffer.view)) for i in range(len(source.index.digests)))
    buffer.close()
    return data


class Waits(threading.Event):
    """Notes how long it was waited for; nobody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_s: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.asked_s.append(timeout)
        return True


def test_a_copy_that_stands_still_is_looked_at_seldom(image: memoryview) -> None:
    """Each look wakes a core; one that moves is followed closely, and a seal wakes at once."""
    half = len(image) // 2 // CHUNK * CHUNK
    copied = iter([*[0] * 8, CHUNK // 2, *[half] * (half // CHUNK + 3), *[len(image)] * 99])
    result = Persisted()
    one = pipeline(image, None, result, available=lambda: next(copied))
    one._sealed = waits = Waits()
    one.start()
    one.join()
    looks_ms = [round(s * 1e3) for s in waits.asked_s if s is not None]
    assert looks_ms == [1, 2, 4, 8, 16, 16, 16, 16, 1, 1, 2, 4]
    assert waits.asked_s[len(looks_ms) :] == [None], "and then for the seal"
    assert all(result.digests)


def test_a_copy_that_is_not_followed_is_waited_for_without_a_look(image: memoryview) -> None:
    """Without streaming nothing happens before the seal."""
    result = Persisted()
    one = pipeline(image, None, result, streaming=False, available=lambda: 1 // 0)
    waits = Waits()
    one._sealed = waits
    waits.set()
    one.start()
    one.join()
    assert all(result.digests)


def test_an_image_that_cannot_be_looked_at_is_told_of_behind_its_seal(image: memoryview) -> None:
    """Without a file nobody else would say so; before the seal the trainer writes there."""
    result, told = Persisted(), threading.Event()
    one = pipeline(
        image, None, result, inspect=lambda image: 1 // 0, on_undigested=lambda error: told.set()
    )
    one.start()
    assert not told.wait(0.1)
    one.sealed()
    assert told.wait(PATIENCE_S)
    one.join()
    assert not result.digests
    assert one.settled.is_set()


def test_one_that_was_cancelled_tells_nothing(image: memoryview) -> None:
    """The slot is another one's by then."""
    told: list[Exception] = []
    one = pipeline(image, None, Persisted(), available=lambda: 1 // 0, on_undigested=told.append)
    one.start()
    one.cancel()
    assert not told


@pytest.mark.parametrize("codec", ["none", "planes", "zstd"])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("writers", [1, 3])
def test_a_shard_is_written_and_read_back_whole(
    image: memoryview, tmp_path: Path, codec: str, direct: bool, writers: int
) -> None:
    """End to end: digests, file, index, chunks."""
    path = tmp_path / "shard.safetensors"
    result = persist(image, str(path), codec, direct_io=direct, writers=writers)
    index = index_of(image, result, G)
    assert result.digests == tuple(
        chunk_digest(image[i : i + CHUNK]) for i in range(0, len(image), CHUNK)
    )
    source = ShardFileSource(str(path), index, direct=direct)
    assert read_all(source) == image
    source.close()
    assert result.outcome is not None
    assert result.outcome.stored_bytes == path.stat().st_size
    assert (path.stat().st_size < len(image)) == (codec != "none")


def test_a_plain_shard_is_the_image(image: memoryview, tmp_path: Path, state: LiveState) -> None:
    """safetensors finds the tensors."""
    path = tmp_path / "shard.safetensors"
    persist(image, str(path))
    assert path.read_bytes() == image
    with safe_open(path, framework="pt") as file:
        for name, tensor in state.lazy_tensors().items():
            assert bytes_of(file.get_tensor(name)) == bytes_of(tensor)


def test_an_encoded_shard_opens_too_and_holds_the_frames(image: memoryview, tmp_path: Path) -> None:
    """Every frame is a U8 tensor named after its chunk; everything else is a pad."""
    path = tmp_path / "shard.safetensors"
    result = persist(image, str(path), "zstd")
    assert result.outcome is not None
    with safe_open(path, framework="pt") as file:
        names = {n for n in file.keys() if not n.startswith("__pad.")}  # noqa: SIM118
        assert names == {f"__chunk@enc.{i}" for i in range(len(result.digests))}
        for i, chunk in enumerate(result.outcome.stored):
            frame = bytes_of(file.get_tensor(f"__chunk@enc.{i}"))
            assert chunk_digest(memoryview(frame)) == chunk.digest
            assert len(frame) == chunk.length
            assert chunk.offset % 4096 == 0


def test_only_the_ranges_of_the_codec_are_encoded(image: memoryview, tmp_path: Path) -> None:
    """Chunks outside the class keep their bytes."""
    result = persist(image, str(tmp_path / "s"), "zstd", codec_ranges=((0, 3 * CHUNK, 1, 0),))
    assert result.outcome is not None
    plain = [
        chunk.digest == digest
        for chunk, digest in zip(result.outcome.stored, result.digests, strict=True)
    ]
    assert all(plain[3:])


@pytest.mark.parametrize("codec", ["none", "planes", "zstd"])
def test_every_flipped_stored_byte_is_detected(
    image: memoryview, tmp_path: Path, codec: str
) -> None:
    """One byte of every chunk, at its start, middle and end."""
    path = tmp_path / "shard"
    index = index_of(image, persist(image, str(path), codec), G)
    whole = bytearray(path.read_bytes())
    for number in range(len(index.digests)):
        start, stop = index.chunk_range(number)
        if index.stored:
            start, stop = index.stored[number].offset, index.stored[number].offset
            stop += index.stored[number].length
        for place in (start, (start + stop) // 2, stop - 1):
            whole[place] ^= 0x10
            path.write_bytes(whole)
            whole[place] ^= 0x10
            source = ShardFileSource(str(path), index)
            buffer = Arena.anonymous(source.room_bytes)
            with pytest.raises(CorruptCheckpointError, match="shard"):
                source.read(number, buffer.view)
            source.close()


@pytest.mark.parametrize("codec", ["none", "planes", "zstd"])
def test_a_cut_shard_is_corrupt_when_opened(image: memoryview, tmp_path: Path, codec: str) -> None:
    """Before a byte is read; no descriptor stays."""
    path = tmp_path / "shard"
    index = index_of(image, persist(image, str(path), codec), G)
    end = len(image) if codec == "none" else max(c.offset + c.length for c in index.stored)
    os.truncate(path, end - 1)
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        ShardFileSource(str(path), index)


@pytest.mark.parametrize(
    "place",
    [{"length": 0}, {"length": CHUNK + 1}, {"offset": -4096}, {"offset": -1}, {"length": -5}],
)
def test_a_hostile_place_of_a_frame_is_corrupt(
    image: memoryview, tmp_path: Path, place: dict[str, int]
) -> None:
    """The index may come from anybody: nothing is read or allocated by it unchecked."""
    from dataclasses import replace

    path = tmp_path / "shard"
    index = index_of(image, persist(image, str(path), "zstd"), G)
    os.truncate(path, path.stat().st_size + 2 * CHUNK)  # also where chunk 1 was written last
    stored = (index.stored[0], replace(index.stored[1], **place), *index.stored[2:])
    source = ShardFileSource(str(path), replace(index, stored=stored))
    buffer = Arena.anonymous(source.room_bytes)
    with pytest.raises(CorruptCheckpointError, match="chunk 1 claims"):
        source.read(1, buffer.view)
    source.close()


def test_a_claimed_chunk_size_allocates_no_more_than_the_image(tmp_path: Path) -> None:
    """1 GiB chunks of an image of one page."""
    path = tmp_path / "shard"
    path.write_bytes(bytes(4096))
    index = ImageIndex(
        run_id="run", generation=G, step=1, rank=0, world_size=1, layout_digest="",
        image_bytes=4096, chunk_bytes=2**30, digests=(chunk_digest(memoryview(bytes(4096))),),
    )  # fmt: skip
    source = ShardFileSource(str(path), index)
    assert source.room_bytes <= 2 * 4096
    assert read_all(source) == bytes(4096)
    source.close()


# --- streaming, sealing, cancelling --------------------------------------------------------------


class Progress:
    """What the trainer's counter says."""

    def __init__(self) -> None:
        self.copied = 0

    def __call__(self) -> int:
        return self.copied


def test_nothing_is_reported_before_the_seal(image: memoryview, tmp_path: Path) -> None:
    """All bytes are written and the snapshot may still turn out to be torn."""
    result, progress = Persisted(), Progress()
    path = tmp_path / "shard"
    one = pipeline(image, target(str(path)), result, available=progress)
    one.start()
    progress.copied = len(image)
    one.cancel()
    one.join()
    assert (result.digests, result.outcome, result.error) == ((), None, None)
    assert not path.exists()


def test_chunks_are_written_before_the_last_one_is_copied(
    image: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streaming: the first write does not wait for the seal; the header's chunk comes last."""
    order: list[int] = []
    written = threading.Event()
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        order.append(at)
        written.set()
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    result, progress = Persisted(), Progress()
    one = pipeline(image, target(str(tmp_path / "s"), writers=1), result, available=progress)
    one.start()
    progress.copied = 2 * CHUNK
    assert written.wait(PATIENCE_S)
    assert order[0] == 4096
    one.sealed()
    assert result.ended.wait(PATIENCE_S)
    assert order[-1] == 0
    assert order[:-1] == sorted(order[:-1])
    assert (tmp_path / "s").read_bytes() == image


def test_without_streaming_nothing_is_written_before_the_seal(
    image: memoryview, tmp_path: Path
) -> None:
    """The switch does what it says."""
    result = Persisted()
    one = pipeline(image, target(str(tmp_path / "s")), result, streaming=False)
    one.start()
    one.cancel()
    one.join()
    assert not (tmp_path / "s").exists()
    assert result.digests == ()


def test_a_cancelled_shard_leaves_no_file_and_says_nothing(
    image: memoryview, tmp_path: Path
) -> None:
    """Before the start, twice, and in the middle."""
    result = Persisted()
    never = pipeline(image, target(str(tmp_path / "never")), result)
    never.cancel()
    never.cancel()
    progress = Progress()
    middle = pipeline(image, target(str(tmp_path / "middle")), result, available=progress)
    middle.start()
    progress.copied = 3 * CHUNK
    middle.cancel()
    middle.join()
    assert list(tmp_path.iterdir()) == []
    assert (result.digests, result.outcome, result.error) == ((), None, None)


def test_cancelling_does_not_wait_for_a_store_that_hangs(
    image: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper's loop cancels: it stood still with the store, and its node counted as lost."""
    hung, writing, real = threading.Event(), threading.Event(), os.pwrite

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        writing.set()
        hung.wait(PATIENCE_S)
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    result, path = Persisted(), tmp_path / "shard"
    one = pipeline(image, target(str(path)), result)
    one.sealed()
    one.start()
    assert writing.wait(PATIENCE_S)
    one.cancel()
    assert path.exists(), "still being written"
    hung.set()
    one.join()
    assert not path.exists()
    assert (result.outcome, result.error) == (None, None)


def test_cancelling_waits_for_the_encoding(
    image: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder reads its chunk twice: the slot must not be filled anew in between."""
    real, encoding, ended = pipelines.encode_chunk, threading.Event(), threading.Event()

    def encode_chunk(*what: Any, **how: Any) -> Any:
        encoding.set()
        time.sleep(0.05)
        frame = real(*what, **how)
        ended.set()
        return frame

    monkeypatch.setattr(pipelines, "encode_chunk", encode_chunk)
    one = pipeline(image, target(str(tmp_path / "shard"), "zstd", writers=1), Persisted())
    one.start()
    assert encoding.wait(PATIENCE_S)
    one.cancel()
    assert ended.is_set()
    one.join()


def test_digests_alone_need_no_target(image: memoryview) -> None:
    """The memory tier seals without a disk."""
    result, digested = Persisted(), threading.Event()
    one = pipeline(image, None, result)
    one._on_digested = lambda digests: (result.on_digested(digests), digested.set())  # type: ignore[func-returns-value]
    one.start()
    one.sealed()
    assert digested.wait(PATIENCE_S)
    assert len(result.digests) == -(-len(image) // CHUNK)


def test_a_storage_error_arrives_with_the_digests(
    image: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory tier is not hurt by a full disk; the half file is gone."""
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        if at == 2 * CHUNK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    result = persist(image, str(tmp_path / "shard"))
    assert isinstance(result.error, StorageError)
    assert all(result.digests)
    assert not (tmp_path / "shard").exists()


def test_a_directory_that_cannot_be_made_fails_the_shard_only(
    image: memoryview, tmp_path: Path
) -> None:
    """The answer comes by callback, from whichever thread."""

    def refuse() -> None:
        raise StorageError("no room for a directory")

    result = persist(image, str(tmp_path / "shard"), prepare=refuse)
    assert isinstance(result.error, StorageError)
    assert all(result.digests)


def test_digests_are_announced_in_order_and_what_is_sealed_waits_for_nobody(
    image: memoryview, tmp_path: Path
) -> None:
    """A breakpoint save must not hang on the snapshot that a dying trainer left unfinished."""
    index = index_of(image, persist(image, str(tmp_path / "first")), G)
    hung = threading.Event()  # the snapshot before, or after, whose trainer does not come back
    late, digested = Persisted(), threading.Event()
    new = pipeline(image, None, late, after=hung)
    new._on_digested = lambda digests: (late.on_digested(digests), digested.set())  # type: ignore[func-returns-value]
    new.sealed()
    new.start()
    saved = Persisted()
    sealed = pipeline(image, target(str(tmp_path / "second")), saved, known=index, after=hung)
    sealed.sealed()
    sealed.start()
    assert saved.ended.wait(PATIENCE_S)
    assert saved.outcome is not None
    assert late.digests == ()
    hung.set()
    assert digested.wait(PATIENCE_S)


def test_a_shard_that_is_cancelled_before_it_begins_makes_no_directory(
    image: memoryview, tmp_path: Path
) -> None:
    """Its generation may be in the trash already."""
    made: list[bool] = []
    goal = target(str(tmp_path / "shard"), prepare=lambda: made.append(True))
    one = pipeline(image, goal, Persisted())
    one._cancelled = True
    one.start()
    one.cancel()
    one.join()
    assert made == []


def test_a_slot_that_changed_since_it_was_sealed_is_not_written(
    image: memoryview, tmp_path: Path
) -> None:
    """A later persist of a sealed slot compares every chunk with the digests of the seal."""
    index = index_of(image, persist(image, str(tmp_path / "first")), G)
    image[3 * CHUNK + 5] ^= 1
    result = Persisted()
    one = pipeline(image, target(str(tmp_path / "second")), result, known=index)
    one.sealed()
    one.start()
    assert result.ended.wait(PATIENCE_S)
    assert isinstance(result.error, CorruptCheckpointError)
    assert "chunk 3 of checkpoint step 1 (term 1) changed since" in str(result.error)
    assert not (tmp_path / "second").exists()


def test_an_image_smaller_than_a_chunk_is_one(tmp_path: Path) -> None:
    """The chunk with the header is the only one."""
    arena = Arena.anonymous(4096)
    for codec in ("none", "zstd"):
        index = index_of(arena.view, persist(arena.view, str(tmp_path / codec), codec), G)
        source = ShardFileSource(str(tmp_path / codec), index)
        assert read_all(source) == bytes(4096)
        source.close()
