"""Bytes to write while searching: of the job's newest checkpoint, else made up like its state.

Codecs and disks care what they are given: trained weights hardly shrink, zeros vanish.
"""

import os
from dataclasses import dataclass

import numpy as np

from autockpt.executors.linux.memory import PAGE_BYTES, Arena, require_headroom
from autockpt.executors.storage.catalogue import list_generations, open_shard
from autockpt.executors.storage.directory.records import read_commit
from autockpt.values.errors import AutockptError
from autockpt.values.profile import StateInventory

PIECE_BYTES = 2 * 2**20
_HALF = ("float16", "bfloat16")


@dataclass(slots=True, kw_only=True)
class Content:
    """Page-aligned, faulted memory with the bytes of a checkpoint."""

    arena: Arena
    source: str
    """Where they came from, in words."""

    def images(self, ranks: int, nbytes: int) -> list[memoryview]:
        """One image of `nbytes` a rank; ranks share bytes where there are not enough."""
        room = max(1, self.arena.nbytes // nbytes)
        starts = [(rank % room) * nbytes for rank in range(ranks)]
        return [self.arena.view[start : start + nbytes] for start in starts]


def content(checkpoints: str, state: StateInventory, *, nbytes: int) -> Content:
    """`nbytes` of the newest readable checkpoint, else of numbers like the state's.

    Raises GuardError when there is no memory for it.
    """
    nbytes = max(PAGE_BYTES, nbytes // PAGE_BYTES * PAGE_BYTES)
    require_headroom(nbytes, what="tune: a sample of the state")
    arena = Arena.anonymous(nbytes)
    for folder in _newest_first(checkpoints):
        try:
            _read(folder, arena)
        except (AutockptError, OSError):
            continue  # damaged, or going away just now: an older one has the same kind of bytes
        return Content(arena=arena, source=f"checkpoint {os.path.basename(folder)} of this job")
    _make_up(state, arena)
    return Content(arena=arena, source="synthetic numbers like the state's: no checkpoint to read")


def main_dtype(state: StateInventory) -> str:
    """Return the type of most bytes of a state, as safetensors names it: BF16 or F32."""
    half = sum(part.dtypes.get(name, 0) for part in state.classes for name in _HALF)
    return "BF16" if half > state.total_bytes / 2 else "F32"


def _newest_first(checkpoints: str) -> list[str]:
    if not os.path.isdir(checkpoints):
        return []
    usable = [r for r in list_generations(checkpoints) if r.state in ("committed", "verified")]
    return [os.path.join(checkpoints, record.name) for record in reversed(usable)]


def _read(folder: str, arena: Arena) -> None:
    """Fills the arena with chunks spread over rank 0's image; a small image comes repeatedly."""
    commit = read_commit(os.path.join(folder, "COMMIT"))
    record = commit.records[0]
    source = open_shard(folder, record, commit)
    try:
        buffer, done, count = Arena.anonymous(source.room_bytes), 0, len(source.index.digests)
        wanted = -(-arena.nbytes // source.index.chunk_bytes)
        step = max(1, count // wanted)
        for turn in range(10**9):
            data = source.read(turn * step % count, buffer.view)
            part = min(len(data), arena.nbytes - done)
            arena.view[done : done + part] = data[:part]
            done += part
            if done == arena.nbytes:
                return
    finally:
        source.close()


def _make_up(state: StateInventory, arena: Arena) -> None:
    """Normal numbers for parameters, small and squared ones for moments, in the state's shares."""
    draw = np.random.default_rng(0)
    total = max(1, sum(part.bytes for part in state.classes))
    halves = {p.name: sum(p.dtypes.get(n, 0) for n in _HALF) > p.bytes / 2 for p in state.classes}
    for start in range(0, arena.nbytes, PIECE_BYTES):
        piece = arena.view[start : start + PIECE_BYTES]
        done = 0
        for part in state.classes:
            stop = min(len(piece), done + round(len(piece) * part.bytes / total))
            squared, half = part.name == "moments", halves[part.name]
            piece[done:stop] = _numbers(draw, stop - done, squared=squared, half=half)
            done = stop
        piece[done:] = _numbers(draw, len(piece) - done, squared=False, half=False)


def _numbers(draw: np.random.Generator, nbytes: int, *, squared: bool, half: bool) -> memoryview:
    numbers = draw.standard_normal(-(-nbytes // (2 if half else 4)), dtype=np.float32)
    numbers *= np.float32(0.02)
    if squared:
        numbers[::2] **= 2
    # bfloat16 is the upper half of a float32; numpy has no name for it.
    raw = numbers.view(np.uint16)[1::2].copy() if half else numbers
    return memoryview(raw.tobytes())[:nbytes]
