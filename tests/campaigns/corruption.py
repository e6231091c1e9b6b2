"""Damage to everything that is stored: found, or without consequence; never other numbers.

What is damaged is put right again after every case, so that tens of thousands fit a minute.
"""

import functools
import random
from collections.abc import Callable
from pathlib import Path

from autockpt.executors.image.container import (
    ImageIndex,
    chunk_digest,
    read_trailer,
    trailer_capacity,
    write_trailer,
)
from autockpt.executors.linux.memory import PAGE_BYTES, Arena
from autockpt.executors.restore.shard_sources import SlotSource
from autockpt.values.errors import AutockptError, CorruptCheckpointError
from autockpt.values.generation import Generation
from tests.campaigns.framework import require
from tests.campaigns.job import CHUNK, DURABLE, SHAPES, Job, Scene, image_of, no_leak, read_shard

TARGETS = {"slot": 4, "shard": 6, "index": 3, "commit": 3, "decision": 1, "term": 1, "run": 1}
"""What is damaged, and how often."""
FULL_EVERY = 25
"""So often the whole choice and restore is played, not the reading of one shard alone."""


class Corruptions:
    """Bit flips, bursts, zeroed pages, truncation, growth, swapped and stale chunks and files."""

    claim = "damage is found before a byte of it is used, and an older generation comes back"
    distinct: int | None = None

    def __init__(self, scratch: Path) -> None:
        self._jobs: list[Job] = []
        for shape in SHAPES[:3]:
            job = Scene(scratch / f"{SHAPES.index(shape)}", shape).fresh()
            job.start("launch")
            job.directory.mark_ever_committed()
            self._jobs.append(job)
        self._slots = [Slot(job) for job in self._jobs]

    def run(self, number: int, rng: random.Random) -> str:
        """One damage to one thing."""
        which = rng.randrange(len(self._jobs))
        target = rng.choices([*TARGETS], weights=[*TARGETS.values()])[0]
        if target == "slot":
            return self._slots[which].run(rng)
        job = self._jobs[which]
        with no_leak():
            return _on_disk(job, target, rng, full=number % FULL_EVERY == 0)

    def close(self) -> None:
        """The slots are given back."""
        for slot in self._slots:
            slot.close()


class Slot:
    """A sealed slot: what a shard of the newest generation looks like in memory."""

    def __init__(self, job: Job) -> None:
        shape = job.shape
        self._capacity = -(-shape.image_bytes // PAGE_BYTES) * PAGE_BYTES
        self._image = image_of(DURABLE, 0, shape)
        older = image_of(Generation(term=1, step=2), 0, shape)
        self._stale = self._sealed(job, older, Generation(term=1, step=2))
        self._whole = self._sealed(job, self._image, DURABLE)
        self._arena = Arena.anonymous(len(self._whole))

    def _sealed(self, job: Job, image: bytes, generation: Generation) -> bytes:
        digests = [
            chunk_digest(memoryview(image)[i : i + CHUNK]) for i in range(0, len(image), CHUNK)
        ]
        index = ImageIndex(
            run_id=job.run_id, generation=generation, step=generation.step, rank=0,
            world_size=job.shape.world, layout_digest="layout 0", image_bytes=len(image),
            chunk_bytes=CHUNK, digests=tuple(digests),
        )  # fmt: skip
        region = bytearray(self._capacity + trailer_capacity(len(image), CHUNK))
        region[: len(image)] = image
        write_trailer(memoryview(region)[self._capacity :], index)
        return bytes(region)

    def run(self, rng: random.Random) -> str:
        """Damages the slot, reads it as a restore does."""
        damaged, how = damage(self._whole, self._stale, rng)
        size = min(len(damaged), self._arena.nbytes)
        self._arena.view[:size] = damaged[:size]
        index = read_trailer(self._arena.view[self._capacity : len(self._whole)])
        if index is None:
            return f"slot {how}: no trailer"
        chunks = SlotSource(self._arena, index)
        try:
            found = b"".join(bytes(chunks.read(c, self._arena)) for c in range(len(index.digests)))
        except CorruptCheckpointError:
            return f"slot {how}: found"
        if index.generation == DURABLE:
            require(found == self._image, f"slot, {how}: other bytes were read")
        return f"slot {how}: harmless"

    def close(self) -> None:
        """The memory."""
        self._arena.close()


def _on_disk(job: Job, target: str, rng: random.Random, *, full: bool) -> str:
    rank = rng.randrange(job.shape.world)
    path = _file(job, target, rank)
    whole = _original(path)
    stale_of = Generation(term=1, step=2)
    older = _original(_file(job, target, rank, stale_of)) if _per_generation(target) else whole
    other = _original(_file(job, target, (rank + 1) % job.shape.world))
    damaged, how = damage(whole, rng.choice([older, other]), rng)
    what = f"{target} of {job.shape}, {how}"
    path.write_bytes(damaged)
    try:
        outcome = _read(job, rank, what) if _per_generation(target) and not full else None
        return f"{target} {how}: {outcome or _restore(job, target, what)}"
    finally:
        path.write_bytes(whole)


def _read(job: Job, rank: int, what: str) -> str:
    """The shard alone."""
    try:
        found = read_shard(job.directory.generation_path(DURABLE), rank)
    except AutockptError as error:
        require(job.path in str(error) or "image header" in str(error), f"{what}: unnamed {error}")
        return "found"
    require(found == image_of(DURABLE, rank, job.shape), f"{what}: other bytes were read")
    return "harmless"


def _restore(job: Job, target: str, what: str) -> str:
    """The whole choice, as another process makes it."""
    after = Job(path=job.path, shape=job.shape)
    try:
        after.run_id = after.directory.open()
        holder = after.directory.highest_term()
        require(holder is not None and holder.term == 2, f"{what}: the term is {holder}")
        restored = after.restore()
        ever = after.directory.ever_committed()
    except AutockptError as error:
        require(target == "run", f"{what}: refused: {error}")
        return "refused"
    if target == "run":
        require(restored == DURABLE or ever, f"{what}: a silent start from scratch")
        return f"restored {restored}"
    least = Generation(term=1, step=2) if _per_generation(target) else DURABLE
    require(restored is not None and restored >= least, f"{what}: restored {restored}")
    return f"restored {restored}"


@functools.cache
def _original(path: Path) -> bytes:
    """As it was when it was read first: before anything was done to it."""
    return path.read_bytes()


def _per_generation(target: str) -> bool:
    return target in ("shard", "index", "commit")


def _file(job: Job, target: str, rank: int, generation: Generation = DURABLE) -> Path:
    name = {
        "shard": f"{generation.name}/shard-{rank:05d}-a1.safetensors",
        "index": f"{generation.name}/idx-{rank:05d}-a1.json",
        "commit": f"{generation.name}/COMMIT",
        "decision": "decisions/t-000002",
        "term": "terms/t-000002",
        "run": "RUN",
    }[target]
    return Path(job.path, name)


def damage(whole: bytes, other: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Something that happens to files: (what it looks like then, its name)."""
    how = rng.choice(sorted(DAMAGES))
    return DAMAGES[how](whole, other, rng), how


def _flip(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _burst(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(whole))
    length = min(rng.randint(1, 512), len(whole) - start)
    return whole[:start] + rng.randbytes(length) + whole[start + length :]


def _zero_page(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(0, len(whole), PAGE_BYTES)
    length = min(PAGE_BYTES, len(whole) - start)
    return whole[:start] + bytes(length) + whole[start + length :]


def _truncate(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    return whole[: rng.choice([0, len(whole) // 2, len(whole) - 1, rng.randrange(len(whole))])]


def _grow(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    return whole + rng.choice([b" ", b"\0", whole, bytes(PAGE_BYTES)])


def _swap(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Two chunks, or two pages, in each other's place."""
    size = rng.choice([CHUNK, PAGE_BYTES, 64, 8])
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    a, b = rng.randrange(len(pieces)), rng.randrange(len(pieces))
    pieces[a], pieces[b] = pieces[b], pieces[a]
    return b"".join(pieces)


def _stale(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """A chunk or a page of another generation or rank, at the same place."""
    size = rng.choice([CHUNK, PAGE_BYTES, 512])
    start = rng.randrange(0, len(whole), size)
    piece = other[start : start + size]
    return whole[:start] + piece + whole[start + len(piece) :]


def _replaced(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """The whole file of another generation or rank."""
    return other


DAMAGES: dict[str, Callable[[bytes, bytes, random.Random], bytes]] = {
    "flip": _flip, "burst": _burst, "zero page": _zero_page, "truncate": _truncate,
    "grow": _grow, "swap": _swap, "stale": _stale, "replaced": _replaced,
}  # fmt: skip
