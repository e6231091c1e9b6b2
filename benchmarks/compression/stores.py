"""Time until durable, and to restore, on stores of known speed: as it is, planes, and a delta.

The keeper's own pipeline and reader move an image of the training's tensors, while nothing trains;
what a store of that speed would take longer than the disk is slept.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autockpt.executors.image.container import ImageIndex
from autockpt.executors.image.layout.runs import Kind
from autockpt.executors.keeper.saving.delta_bases import Base
from autockpt.executors.keeper.saving.shard_writer import PersistTarget, ShardOutcome, ShardPipeline
from autockpt.executors.linux.memory import Arena, page_align
from autockpt.executors.storage.catalogue import ShardFileSource
from autockpt.executors.storage.shard_file import run_parallel
from autockpt.values.generation import Generation
from autockpt.values.plan import CHUNK_BYTES, WRITERS
from benchmarks.ablation.store import slow_store
from benchmarks.compression import tensors
from benchmarks.harness import Row, row

RATES = {"50 MB/s": 50e6, "500 MB/s": 500e6, "the disk": 1e15}
GAP = 10
"""Steps between the image and the base of its delta."""
PATIENCE_S = 300.0
Words = np.ndarray[Any, Any]


@dataclass(slots=True)
class Image:
    """Tensors of one step in memory, and what their bytes are."""

    arena: Arena
    ranges: tuple[tuple[int, ...], ...]
    generation: Generation

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return self.arena.view

    def delta_ranges(self) -> tuple[tuple[int, ...], ...]:
        """The same, where a base may be used."""
        code = Kind(4, True, True).code
        return tuple((low, high, code, group) for low, high, _, group in self.ranges)


def image(training: tensors.Training, step: int) -> Image:
    """fp32 weights and moments, one after another."""
    parts = [tensors.read(training, name, step, "fp32") for name in tensors.CLASSES]
    arena = Arena.anonymous(page_align(sum(part.nbytes for part in parts)))
    ranges, at = [], 0
    for group, part in enumerate(parts):
        arena.view[at : at + part.nbytes] = memoryview(part).cast("B")
        ranges.append((at, at + part.nbytes, Kind(4, True).code, group))
        at += part.nbytes
    return Image(arena, tuple(ranges), Generation(term=1, step=step))


@dataclass(slots=True)
class Written:
    """A shard file, how long it took, and how to read it."""

    path: str
    index: ImageIndex
    durable_s: float
    base: "Written | None" = None

    def open(self) -> ShardFileSource:
        """With its base, nothing of either in the page cache."""
        return ShardFileSource(self.path, self.index, base=self.base.open() if self.base else None)

    def restore_s(self) -> float:
        """Every chunk read, verified and decoded by the readers of a restore."""
        source, began = self.open(), time.monotonic()
        free = [Arena.anonymous(source.room_bytes) for _ in range(source.workers)]

        def read(chunk: int) -> None:
            buffer = free.pop()
            source.read(chunk, buffer.view)
            free.append(buffer)

        run_parallel(range(len(self.index.digests)), read, workers=source.workers)
        seconds = time.monotonic() - began
        source.close()
        for buffer in free:
            buffer.close()
        return seconds


@dataclass(slots=True)
class _Ending:
    digests: tuple[str, ...] = ()
    outcome: ShardOutcome | None = None
    error: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def set(self, name: str) -> Callable[[Any], None]:
        """A callback that remembers."""

        def told(value: Any) -> None:
            setattr(self, name, value)
            if name != "digests":
                self.ended.set()

        return told


def write(one: Image, path: str, codec: str, base: tuple[Image, Written] | None = None) -> Written:
    """As a keeper does with an image that is in its slot."""
    ending = _Ending()
    against = Base(base[0].view, base[1].index, bases=0) if base else None
    target = PersistTarget(
        path=path, prepare=lambda: None, writers=WRITERS, direct_io=True, codec=codec,
        codec_ranges=one.delta_ranges() if base else one.ranges, base=against,
    )  # fmt: skip
    began = time.monotonic()
    pipeline = ShardPipeline(
        one.view, chunk_bytes=CHUNK_BYTES, available=lambda: len(one.view), streaming=True,
        known=None, target=target, on_digested=ending.set("digests"),
        on_persisted=ending.set("outcome"), on_failed=ending.set("error"),
    )  # fmt: skip
    pipeline.sealed()
    pipeline.start()
    if not ending.ended.wait(PATIENCE_S) or ending.outcome is None:
        raise RuntimeError(f"{codec} was not written: {ending.error!r}")
    durable_s = time.monotonic() - began
    pipeline.join()
    index = ImageIndex(
        run_id="bench", generation=one.generation, step=1, rank=0, world_size=1,
        layout_digest="", image_bytes=len(one.view), chunk_bytes=CHUNK_BYTES,
        digests=ending.digests, codec=codec, stored=ending.outcome.stored,
        base=base[0].generation if base and ending.outcome.needs_base else None,
    )  # fmt: skip
    return Written(path, index, durable_s, base[1] if base else None)


def measure(training: tensors.Training, rounds: int) -> list[Row]:
    """Rows of every store."""
    now, before = image(training, training.steps), image(training, training.steps - GAP)
    rows: list[Row] = []
    for store, rate in RATES.items():
        folder = tempfile.mkdtemp(prefix="bench-codecs-", dir=Path.cwd())
        try:
            taken: dict[str, list[tuple[float, float]]] = {}
            for turn in range(rounds):
                for name, (durable_s, restore_s) in _round(now, before, folder, rate, turn).items():
                    taken.setdefault(name, []).append((durable_s, restore_s))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        rows += _rows(store, taken)
    return rows


def _round(
    now: Image, before: Image, folder: str, rate: float, turn: int
) -> dict[str, tuple[float, float]]:
    base = write(before, f"{folder}/base-{turn}", "planes")
    with slow_store(rate):
        written = {
            "none": write(now, f"{folder}/none-{turn}", "none"),
            "planes": write(now, f"{folder}/planes-{turn}", "planes"),
            "delta": write(now, f"{folder}/delta-{turn}", "planes", (before, base)),
        }
        return {name: (one.durable_s, one.restore_s()) for name, one in written.items()}


def _rows(store: str, taken: dict[str, list[tuple[float, float]]]) -> list[Row]:
    rows = []
    for name, pairs in taken.items():
        rows.append(row(name, f"{store}: durable", [a for a, _ in pairs], "s"))
        rows.append(row(name, f"{store}: restore", [b for _, b in pairs], "s"))
    return rows
