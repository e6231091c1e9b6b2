"""The pipeline against the same stages one after another, on a store as slow as the rest of them.

Save: digest and zstd, then write.  Load: read, then verify, decode and copy.  A serial pass in one
thread times each side alone; the bound is their sum over the longer one.  The store's speed is
chosen so that both sides take about as long and the bound is near 2; `store` says what it does.
"""

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy
import torch

from autockpt.executors.image.codecs import codec
from autockpt.executors.image.container import chunk_digest
from autockpt.executors.keeper.saving.encoded_file import FRAME_SLACK, FrameBuffer
from autockpt.executors.keeper.saving.shard_writer import PersistTarget, ShardOutcome, ShardPipeline
from autockpt.executors.linux.memory import Arena, page_align
from autockpt.executors.restore.reader import restore_shards
from autockpt.executors.restore.shard_sources import one_shard
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.catalogue import ShardFileSource, open_shard
from autockpt.executors.storage.directory.records import read_commit
from autockpt.executors.storage.shard_file import ImageFile
from autockpt.values.plan import CHUNK_BYTES, WRITERS
from benchmarks.ablation.presets import attach, begin_save, goal_of
from benchmarks.ablation.store import SlowStore, slow_store
from benchmarks.job import Job

CODEC: Final = "zstd"
FAST = 1e15
"""Bytes per second of a store that is not slowed down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One serial pass over all chunks, seconds."""

    total_s: float
    store_s: float
    """In the store: write or read."""

    @property
    def compute_s(self) -> float:
        """In everything else."""
        return self.total_s - self.store_s

    @property
    def bound(self) -> float:
        """How many times faster a perfect overlap of the two would be."""
        return self.total_s / max(self.store_s, self.compute_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Rounds of one direction."""

    serial: list[Pass]
    pipelined_s: list[float]
    store_bytes_per_s: float

    @property
    def gains(self) -> list[float]:
        """Serial over pipelined, by round."""
        return [a.total_s / b for a, b in zip(self.serial, self.pipelined_s, strict=True)]

    @property
    def shares(self) -> list[float]:
        """Part of the bound that was reached, by round."""
        return [gain / one.bound for gain, one in zip(self.gains, self.serial, strict=True)]


def compare(
    serial: Callable[[SlowStore], Pass], pipelined: Callable[[], float], nbytes: int, rounds: int
) -> Compared:
    """Calibrates the store to the compute time, then both in turn; the first round is dropped."""
    with slow_store(FAST) as store:
        compute_s = statistics.median(serial(store).compute_s for _ in range(3))
    rate = nbytes / compute_s
    passes, times = [], []
    for _ in range(rounds + 1):
        with slow_store(rate) as store:
            passes.append(serial(store))
        with slow_store(rate):
            times.append(pipelined())
    return Compared(serial=passes[1:], pipelined_s=times[1:], store_bytes_per_s=rate)


# --- save -----------------------------------------------------------------------------------------


def compare_save(job: Job, folder: Path, rounds: int) -> Compared:
    """The state in host memory to an encoded file."""
    tensors = job.tensors()
    arena = Arena.anonymous(sum(tensor.nbytes for tensor in tensors))
    at = 0
    for tensor in tensors:
        ctypes.memmove(arena.address + at, tensor.data_ptr(), tensor.nbytes)
        at += tensor.nbytes
    path = folder / "encoded"
    stored = sum(len(codec(CODEC).encode(chunk)) for chunk in _chunks(arena.view))
    try:
        return compare(
            lambda store: serial_save(arena.view, path, store),
            lambda: pipelined_save(arena.view, path),
            stored,
            rounds,
        )
    finally:
        arena.close()


def _chunks(image: memoryview) -> list[memoryview]:
    return [image[start : start + CHUNK_BYTES] for start in range(0, len(image), CHUNK_BYTES)]


def serial_save(image: memoryview, path: Path, store: SlowStore) -> Pass:
    """Each chunk is digested, encoded and written before the next is touched."""
    frames, offset, finish_s = FrameBuffer(), 0, 0.0
    before_s, began = store.busy_s, time.perf_counter()
    file = ImageFile(str(path), allocate_bytes=0, direct=True)
    for chunk in _chunks(image):
        chunk_digest(chunk)
        frame = codec(CODEC).encode(chunk, into=frames.room(len(chunk) + FRAME_SLACK))
        stored = memoryview(frame) if len(frame) < len(chunk) else chunk
        chunk_digest(stored)
        file.write_at(offset, frames.aligned(stored))
        offset += page_align(len(stored))
    finish_s = file.finish(offset)
    total_s = time.perf_counter() - began
    path.unlink()
    return Pass(total_s=total_s, store_s=store.busy_s - before_s + finish_s)


def pipelined_save(image: memoryview, path: Path) -> float:
    """The same by the keeper's pipeline; seconds until durable."""
    ended, problems = threading.Event(), []

    def persisted(outcome: ShardOutcome) -> None:
        ended.set()

    def failed(error: Exception) -> None:
        problems.append(error)
        ended.set()

    target = PersistTarget(
        path=str(path), prepare=lambda: None, writers=WRITERS, direct_io=True, codec=CODEC,
        codec_ranges=(),
    )  # fmt: skip
    shard = ShardPipeline(
        image, chunk_bytes=CHUNK_BYTES, available=lambda: len(image), streaming=True, known=None,
        target=target, on_digested=lambda digests: None, on_persisted=persisted, on_failed=failed,
    )  # fmt: skip
    began = time.perf_counter()
    shard.start()
    shard.sealed()
    ended.wait()
    taken_s = time.perf_counter() - began
    shard.cancel()
    if problems:
        raise problems[0]
    path.unlink()
    return taken_s


# --- load -----------------------------------------------------------------------------------------


def compare_load(job: Job, folder: Path, rounds: int) -> Compared:
    """An encoded checkpoint that a session wrote, to live tensors."""
    goal = goal_of("bytecheckpoint-pipeline")
    session = attach(job, folder / "run", replace(goal, pins=replace(goal.pins, codec=CODEC)))
    begin_save(job, session)
    if not session.wait_durable(120.0):
        raise RuntimeError("the checkpoint to load was not written")
    session.close(final_checkpoint=False)
    generation = str(sorted((folder / "run" / "checkpoints").glob("ckpt-*"))[-1])
    commit = read_commit(f"{generation}/COMMIT")

    def source() -> ShardFileSource:
        return open_shard(generation, commit.records[0], commit)

    state = LiveState.of(model=job.model, optimizer=job.optimizer)
    first = source()
    nbytes = sum(chunk.length for chunk in first.index.stored)
    first.close()
    if not nbytes:
        raise RuntimeError("the checkpoint to load is not encoded")
    return compare(
        lambda store: serial_load(job, source, store),
        lambda: pipelined_load(job, state, source),
        nbytes,
        rounds,
    )


def serial_load(job: Job, source: Callable[[], ShardFileSource], store: SlowStore) -> Pass:
    """Each chunk is read, decoded, verified and copied before the next; two thirds are new memory.

    As in the restore: parameters live, the optimizer's state is made.
    """
    _forget(job)
    before_s, began = store.busy_s, time.perf_counter()
    chunks = source()
    index, buffer = chunks.index, Arena.anonymous(chunks.room_bytes)
    live = sum(parameter.nbytes for parameter in job.model.parameters())
    place = torch.empty(index.image_bytes - live, dtype=torch.uint8).numpy()
    for chunk in range(len(index.digests)):
        data = chunks.read(chunk, buffer.view)
        start = index.chunk_range(chunk)[0] % max(1, len(place) - len(data))
        place[start : start + len(data)] = numpy.frombuffer(data, dtype=numpy.uint8)
    buffer.close()
    chunks.close()
    total_s = time.perf_counter() - began
    return Pass(total_s=total_s, store_s=store.busy_s - before_s)


def pipelined_load(job: Job, state: LiveState, source: Callable[[], ShardFileSource]) -> float:
    """The same by the restore; seconds until all tensors are in place."""
    _forget(job)
    began = time.perf_counter()
    chunks = source()
    restore_shards(one_shard(chunks), state)
    taken_s = time.perf_counter() - began
    chunks.close()
    return taken_s


def _forget(job: Job) -> None:
    """As in a process that has just started."""
    job.optimizer.state.clear()
    gc.collect()
