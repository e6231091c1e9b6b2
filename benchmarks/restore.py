"""`make bench-restore`: how fast a state comes back, against what the hardware needs for its bytes.

A run of the example through `autockpt.attach` leaves one sealed slot and one committed shard.  Both
are restored in full (tensors, optimizer, extras, every digest checked) into a live model whose
optimizer is empty, as in a process that has just started; the plain contestants move the same
bytes into memory that is faulted already, with as many threads.  All take turns in one process,
ratios are taken within a round, which waits a while until nobody else computes.

New memory is new: the allocator is told to map every large tensor, so that a freed one is unmapped
and not handed out again with its pages.  "first touch" is what these pages alone cost when they are
written once in the ordinary way; the restore pays for them, the plain contestants do not.  What
is free for seconds, a virtual machine's host takes away and gives back page by page when it is
touched: no engine can change that, so it is done before the clock starts (`settle`).
"""

import argparse
import contextlib
import ctypes
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import autockpt
from autockpt.executors.image.container import ImageIndex, read_trailer
from autockpt.executors.linux.memory import Arena
from autockpt.executors.restore.apply_state import apply_state
from autockpt.executors.restore.reader import restore_shards
from autockpt.executors.restore.shard_sources import COPIERS, ChunkSource, SlotSource, one_shard
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.catalogue import (
    READERS,
    ShardFileSource,
    load_index,
    open_shard,
    shard_path,
)
from autockpt.executors.storage.directory.records import read_commit
from autockpt.executors.storage.shard_file import read_image, run_parallel
from autockpt.values.goal import Goal, Pins, Retention
from benchmarks.harness import Row, parse, publish, row
from benchmarks.job import Job

COLD_TARGET, MEMORY_TARGET = 1.2, 1.3
COPY_BYTES = 4 * 2**20
M_MMAP_THRESHOLD = -3
READY_WITHIN_S = 120.0
NEVER = 10**9
QUIET_WITHIN_S = 30.0
NEEDED = 3
"""Bytes that a restore allocates at most, in sizes of the parameters: two moments and buffers."""


class Saved:
    """One sealed slot and one committed shard of the same state."""

    def __init__(self, session: Any) -> None:
        folders = sorted(Path(session._job.checkpoints).glob("ckpt-*"))
        self.folder = str(folders[-1])
        commit = read_commit(f"{self.folder}/COMMIT")
        self.record = commit.records[0]
        self.shard = shard_path(self.folder, self.record)
        root = load_index(self.folder, self.record, commit).root
        self.arena, self.index = _slot(session, root)

    def wait_verified(self) -> None:
        """The keeper reads back what it wrote; not beside the figures."""
        deadline = time.monotonic() + READY_WITHIN_S
        while not os.path.exists(f"{self.folder}/VERIFIED") and time.monotonic() < deadline:
            time.sleep(0.1)

    def from_disk(self) -> ShardFileSource:
        """Nothing of it in the page cache."""
        with open(self.shard, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return open_shard(self.folder, self.record, read_commit(f"{self.folder}/COMMIT"))

    def from_memory(self) -> SlotSource:
        """The slot."""
        return SlotSource(self.arena, self.index)


def _slot(session: Any, root: str) -> tuple[Arena, ImageIndex]:
    link = session._client
    for arena in link.slots:
        index = read_trailer(arena.view[link.image_bytes :])
        if index is not None and index.root == root:
            return arena, index
    raise RuntimeError("no slot holds what was committed")


class Reborn:
    """The live state of a process that has just started: a model, an optimizer without state."""

    def __init__(self, size: str, tokens: int) -> None:
        self.job = Job(size, tokens)
        self.state = LiveState.of(model=self.job.model, optimizer=self.job.optimizer)
        self.nbytes = sum(parameter.nbytes for parameter in self.job.model.parameters())

    def forget(self) -> None:
        """Back to the start: what the last restore allocated is unmapped."""
        self.job.optimizer.state.clear()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def settle(self) -> None:
        """As `forget`; then as many free bytes as a restore needs are the replica's own."""
        self.forget()
        with contextlib.closing(Arena.anonymous(NEEDED * self.nbytes)):
            pass

    def restore(self, source: Callable[[], ChunkSource]) -> float:
        """Seconds of a whole restore, from opening the source."""
        self.settle()
        began = time.perf_counter()
        chunks = source()
        try:
            restored = restore_shards(one_shard(chunks), self.state)
        finally:
            chunks.close()
        apply_state(restored, self.state)
        return time.perf_counter() - began

    def fresh_shapes(self) -> list[tuple[int, ...]]:
        """Of the tensors that a restore has to allocate."""
        values = (v for state in self.job.optimizer.state.values() for v in state.values())
        return [tuple(v.shape) for v in values if isinstance(v, torch.Tensor)]


def first_touch(shapes: list[tuple[int, ...]]) -> float:
    """Seconds that the new tensors' pages cost when they are first written, COPIERS threads."""
    tensors = [torch.empty(shape) for shape in shapes]
    began = time.perf_counter()

    def write(i: int) -> None:
        ctypes.memset(tensors[i].data_ptr(), 0, tensors[i].nbytes)

    run_parallel(range(len(tensors)), write, workers=COPIERS)
    return time.perf_counter() - began


def plain_copy(source: Arena, target: Arena, nbytes: int, threads: int) -> float:
    """Seconds of a copy between two faulted places."""
    began = time.perf_counter()

    def copy(start: int) -> None:
        count = min(COPY_BYTES, nbytes - start)
        ctypes.memmove(target.address + start, source.address + start, count)

    run_parallel(range(0, nbytes, COPY_BYTES), copy, workers=threads)
    return time.perf_counter() - began


@contextlib.contextmanager
def saved_state(size: str, tokens: int) -> Iterator[Saved]:
    """Trains a few iterations, saves once, and keeps the session and its keeper alive."""
    folder = tempfile.mkdtemp(prefix="bench-restore-", dir=os.getcwd())
    job = Job(size, tokens)
    pins = Pins(memory_interval_steps=NEVER, disk_interval_steps=NEVER, retune=False)
    os.environ["AUTOCKPT_NO_PROFILE"] = "1"
    os.environ["AUTOCKPT_SAME_JOB"] = "1"
    session: Any = autockpt.attach(
        model=job.model, optimizer=job.optimizer, run_dir=f"{folder}/run",
        goal=Goal(pins=pins, retention=Retention(keep_last=1)),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + READY_WITHIN_S
        while not session.ready and time.monotonic() < deadline:
            job.iterate()
            session.step()
        session.save()
        for _ in range(2):
            job.iterate()
            session.step()
        if not session.wait_durable(READY_WITHIN_S):
            raise RuntimeError("the checkpoint did not become durable")
        saved = Saved(session)
        saved.wait_verified()
        yield saved
    finally:
        session.close(final_checkpoint=False)
        shutil.rmtree(folder, ignore_errors=True)


def measure(
    size: str, tokens: int, rounds: int, *, quiet_within_s: float
) -> tuple[list[Row], dict[str, Any]]:
    """All contestants in turn; the first round is left out."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    samples: dict[str, list[float]] = {}
    with saved_state(size, tokens) as saved:
        nbytes, chunk_bytes = saved.index.image_bytes, saved.index.chunk_bytes
        reborn, plain = Reborn(size, tokens), Arena.anonymous(nbytes)
        reborn.restore(saved.from_memory)
        shapes, quiet = reborn.fresh_shapes(), 0
        contestants: dict[str, Callable[[], float]] = {
            "read": lambda: read_image(
                saved.shard, plain.view[:nbytes], readers=READERS, chunk_bytes=chunk_bytes,
                direct=True,
            ),
            "disk": lambda: reborn.restore(saved.from_disk),
            "copy": lambda: plain_copy(saved.arena, plain, nbytes, COPIERS),
            "memory": lambda: reborn.restore(saved.from_memory),
            "copy1": lambda: plain_copy(saved.arena, plain, nbytes, 1),
            "touch": lambda: first_touch(shapes),
        }  # fmt: skip
        for turn in range(rounds + 1):
            quiet += wait_quiet(quiet_within_s) and turn > 0
            for name, run in contestants.items():
                reborn.settle()
                seconds = run()
                if turn:
                    samples.setdefault(name, []).append(seconds)
            print(f"round {turn}", {k: f"{v[-1] * 1e3:.0f}" for k, v in samples.items()},
                  file=sys.stderr, flush=True)  # fmt: skip
        plain.close()
    settings = {
        "size": size, "image_bytes": nbytes, "chunk_bytes": chunk_bytes, "readers": READERS,
        "copiers": COPIERS, "rounds": rounds, "rounds_begun_quiet": quiet,
        "new_tensor_bytes": sum(4 * _count(shape) for shape in shapes),
    }  # fmt: skip
    return to_rows(samples, nbytes), settings


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def wait_quiet(within_s: float) -> bool:
    """Whether the processors idled for a moment, within that time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        busy, total = _processor_ticks()
        time.sleep(0.25)
        later_busy, later_total = _processor_ticks()
        if later_busy - busy <= 0.1 * (later_total - total):
            return True
    return False


def _processor_ticks() -> tuple[int, int]:
    """(busy, all) clock ticks of all processors since boot."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def to_rows(samples: dict[str, list[float]], nbytes: int) -> list[Row]:
    """Times, rates, and the two ratios that have targets."""
    names = {
        "read": f"plain O_DIRECT read, {READERS} readers",
        "disk": "autockpt, cold from disk",
        "copy": f"plain host copy, {COPIERS} threads",
        "copy1": "plain host copy, 1 thread",
        "memory": "autockpt, from memory",
        "touch": f"first touch of the new tensors, {COPIERS} threads",
    }
    rows = []
    for key, taken in samples.items():
        rows.append(row(names[key], "time", [s * 1e3 for s in taken], "ms"))
        if key != "touch":
            rows.append(row(names[key], "rate", [nbytes / s / 1e9 for s in taken], "GB/s"))
    for ours, plain, limit in (("disk", "read", COLD_TARGET), ("memory", "copy", MEMORY_TARGET)):
        ratios = [a / b for a, b in zip(samples[ours], samples[plain], strict=True)]
        rows.append(row(names[ours], "over plain", ratios, "x", at_most=limit))
    return rows


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--size", default="60m")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=9)
    args = parse(parser, size="1m", tokens=16, rounds=1)
    torch.set_num_threads(1)
    rows, settings = measure(
        args.size, args.tokens, args.rounds, quiet_within_s=0.0 if args.smoke else QUIET_WITHIN_S
    )
    publish("restore", rows, settings=settings, smoke=args.smoke)


if __name__ == "__main__":
    main()
