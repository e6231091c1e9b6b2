"""The storage side of a job, small and without torch: what campaigns attack.

Every byte of every image follows from (generation, rank), so whatever is restored can be compared
with what it must be.  The operations are the product's own, in the order in which a keeper does
them.
"""

import contextlib
import functools
import hashlib
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autockpt.executors.image.container import ImageIndex
from autockpt.executors.keeper.saving.shard_writer import PersistTarget, ShardOutcome, ShardPipeline
from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol.messages import holds_weights_only
from autockpt.executors.protocol.retention import deletions, reductions
from autockpt.executors.protocol.selection import (
    Choice,
    Question,
    Strike,
    choose,
    newest_chain,
    parents_of,
)
from autockpt.executors.storage.catalogue import (
    ShardFileSource,
    load_index,
    shard_path,
    verify_generation,
)
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import files_of, read_commit
from autockpt.executors.storage.guard import check_deletions, check_reduction
from autockpt.executors.storage.places.choose import place_of
from autockpt.executors.storage.rewriting.commits import (
    forget_rewritten,
    new_suffix,
    remove_replaced,
    replace_commit,
)
from autockpt.values.errors import AutockptError, StorageError
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention
from autockpt.values.record import to_json
from tests.campaigns.framework import require

CHUNK = 2**13
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a job stores."""

    world: int = 1
    chunks: int = 3
    codec: str = "none"
    direct: bool = True
    writers: int = 1
    keep: int = 2

    @property
    def image_bytes(self) -> int:
        """A last chunk that is no whole one."""
        return self.chunks * CHUNK - 4096


SHAPES = (
    Shape(),
    Shape(world=2, codec="zstd"),
    Shape(world=2, chunks=2, direct=False),
    Shape(world=3, chunks=5, writers=2),
)
JOBS = (
    *SHAPES,
    Shape(world=3, chunks=4, codec="zstd", writers=2),
    Shape(world=2, codec="zstd", direct=False, keep=1),
)
"""With some more, where every operation is tried in many ways."""


@functools.lru_cache(maxsize=128)
def image_of(generation: Generation, rank: int, shape: Shape, *, weights: bool = False) -> bytes:
    """The reference: what rank `rank` holds in `generation`; half of it compresses.

    `weights`: after its optimizer state was dropped.
    """
    seed = f"{generation}/{rank}{'/weights' if weights else ''}"
    noise = random.Random(seed).randbytes(shape.image_bytes // 2 + 1)
    return b"".join(noise[i : i + 2048] * 2 for i in range(0, len(noise), 2048))[
        : shape.image_bytes
    ]


class Written:
    """What a pipeline called back with."""

    def __init__(self) -> None:
        self.digests: tuple[str, ...] = ()
        self.outcome: ShardOutcome | None = None
        self.error: Exception | None = None
        self.ended = threading.Event()

    def digested(self, digests: tuple[str, ...]) -> None:
        self.digests = digests

    def persisted(self, outcome: ShardOutcome) -> None:
        self.outcome = outcome
        self.ended.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self.ended.set()


@dataclass(slots=True, kw_only=True)
class Job:
    """One process's end of a checkpoint directory."""

    path: str
    shape: Shape
    term: int = 0
    run_id: str = ""
    promise: Callable[[Generation], None] = lambda generation: None
    """Hears every generation that was reported durable."""
    directory: CheckpointDirectory = field(init=False)

    def __post_init__(self) -> None:
        self.directory = CheckpointDirectory(self.path)

    def start(self, launch: str = "launch") -> Choice | None:
        """Opens, claims the next term, chooses, writes the decision down."""
        self.run_id = self.directory.open()
        self.term = self.directory.claim(self.run_id, launch, 0, force=True)
        self.directory.empty_trash()
        choice = self.choose(frozenset())
        generation = None if choice is None else choice.generation
        self.directory.write_decision(self.term, 1, generation, "newest")
        self.directory.trash_unfinished(self.term)
        remove_replaced(self.directory, term=self.term)
        return choice

    def choose(self, struck: frozenset[Strike]) -> Choice | None:
        """What the protocol would restore."""
        committed = self.directory.catalogue(self.run_id)
        chain = newest_chain(parents_of(self.directory.parents(), committed))
        return choose(
            Question(
                world_size=self.shape.world, memory=(), committed=committed, chain=chain,
                struck=struck,
            )
        )  # fmt: skip

    def save(self, generation: Generation, parent: Generation | None) -> None:
        """All shards, their indices, COMMIT; only then it is reported durable."""
        folder = self.directory.create_generation(generation)
        records = tuple(self._shard(folder, generation, r) for r in range(self.shape.world))
        self.directory.write_commit(
            self.run_id, generation, step=generation.step, world_size=self.shape.world,
            parent=parent, records=records, health="good",
        )  # fmt: skip
        self.promise(generation)

    def reduce(self, generation: Generation) -> None:
        """Its shards are written again, as `keep.weights_only` does it."""
        folder = self.directory.generation_path(generation)
        records: list[dict[str, Any]] = []
        suffix = new_suffix(self.term)
        try:
            catalogue = self.directory.catalogue(self.run_id)
            chain = newest_chain(parents_of(self.directory.parents(), catalogue))
            wish = Retention(keep_last=self.shape.keep, weights_only=True)
            if generation not in reductions(catalogue, wish, chain=chain):
                return
            check_reduction(catalogue, generation)
            commit = read_commit(os.path.join(folder, "COMMIT"))
            for rank in range(self.shape.world):
                record = self._shard(folder, generation, rank, suffix=suffix)
                records.append({**record, "weights_only": True})
            replace_commit(self.directory, commit, tuple(records), term=self.term)
        except (AutockptError, OSError) as error:
            forget_rewritten(self.directory, generation, tuple(records), term=self.term)
            if isinstance(error, OSError):
                raise StorageError(f"{folder}/COMMIT: {error.strerror}") from error
            raise

    def _shard(
        self, folder: str, generation: Generation, rank: int, *, suffix: str = "a1"
    ) -> dict[str, Any]:
        arena = Arena.anonymous(self.shape.image_bytes)
        image = arena.view[: self.shape.image_bytes]
        image[:] = image_of(generation, rank, self.shape, weights=suffix != "a1")
        try:
            return self._store(folder, generation, rank, image, suffix)
        finally:
            image.release()
            arena.close()

    def _store(
        self, folder: str, generation: Generation, rank: int, image: memoryview, suffix: str
    ) -> dict[str, Any]:
        shard, idx = f"shard-{rank:05d}-{suffix}.safetensors", f"idx-{rank:05d}-{suffix}.json"
        written = Written()
        pipeline = ShardPipeline(
            image, chunk_bytes=CHUNK, available=lambda: len(image), streaming=True, known=None,
            target=PersistTarget(
                path=os.path.join(folder, shard),
                prepare=lambda: self.directory.create_generation(generation),
                spare=lambda: self.directory.spares.take(rank),
                writers=self.shape.writers, direct_io=self.shape.direct, codec=self.shape.codec,
                codec_ranges=(),
            ),
            on_digested=written.digested, on_persisted=written.persisted, on_failed=written.failed,
        )  # fmt: skip
        pipeline.sealed()
        pipeline.start()
        require(written.ended.wait(PATIENCE_S), "a pipeline hangs")
        pipeline.join()
        if written.error is not None or written.outcome is None:
            raise written.error or StorageError("nothing was written")
        stored = written.outcome.stored
        index = ImageIndex(
            run_id=self.run_id, generation=generation, step=generation.step, rank=rank,
            world_size=self.shape.world, layout_digest=f"layout {rank}", image_bytes=len(image),
            chunk_bytes=CHUNK, digests=written.digests, stored=stored,
            codec=self.shape.codec if stored else "none",
        )  # fmt: skip
        self.directory.write_index(os.path.join(folder, idx), to_json(index).encode())
        return {
            "rank": rank, "file": shard, "index": idx, "bytes": written.outcome.stored_bytes,
            "root": index.root, "layout_digest": index.layout_digest,
            "chunks": len(index.digests), "chunk_bytes": CHUNK,
        }  # fmt: skip

    def scrub(self, generation: Generation) -> bool:
        """Reads back and marks; False when the storage did not answer."""
        result = verify_generation(self.path, generation.name)
        if result.ok or result.damaged:
            self.directory.mark(generation, "VERIFIED" if result.ok else "CORRUPT")
        return result.ok or result.damaged

    def retain(self) -> None:
        """Deletes what the policy lets go, behind the guard."""
        catalogue = self.directory.catalogue(self.run_id)
        chain = newest_chain(parents_of(self.directory.parents(), catalogue))
        doomed = deletions(catalogue, Retention(keep_last=self.shape.keep), chain=chain)
        check_deletions(catalogue, doomed)
        for generation in doomed:
            self.directory.delete(generation)

    def restore(self) -> Generation | None:
        """The newest generation all of whose shards read back as their digests say.

        Raises AssertionError when what reads back well is not what was saved.
        """
        struck: frozenset[Strike] = frozenset()
        while (choice := self.choose(struck)) is not None:
            folder = self.directory.generation_path(choice.generation)
            bad = None
            for rank in range(self.shape.world):
                try:
                    found = read_shard(folder, rank)
                except AutockptError:
                    bad = rank
                    break
                expected = image_of(choice.generation, rank, self.shape)
                require(found == expected, f"{choice.generation}, rank {rank}: other bytes")
            if bad is None:
                return choice.generation
            struck |= {(bad, choice.generation, "disk")}
        return None


def read_shard(folder: str, rank: int) -> bytes:
    """All verified bytes of a shard.  Raises AutockptError."""
    try:
        commit = read_commit(os.path.join(folder, "COMMIT"))
    except OSError as error:
        raise StorageError(f"{folder}/COMMIT: {error}") from error
    record = commit.records[rank]
    index = load_index(folder, record, commit)
    source = ShardFileSource(shard_path(folder, record), index)
    buffer = Arena.anonymous(source.room_bytes)
    try:
        return b"".join(bytes(source.read(c, buffer.view)) for c in range(len(index.digests)))
    finally:
        source.close()
        buffer.close()


DURABLE = Generation(term=1, step=3)
"""What every scene begins with."""


OLDEST = Generation(term=1, step=1)
"""Below two newer ones that stay whole."""


class Scene:
    """A directory with a past, made once for a shape and copied for every case.

    Beside it stand files of somebody else, in the directory, in a generation and outside.
    """

    def __init__(self, home: Path, shape: Shape, *, stage: Path | None = None) -> None:
        """`stage`: where the copies are made, if not beside the template."""
        self.shape = shape
        self._template = home / f"template-{JOBS.index(shape)}"
        self._place = (stage or home) / f"case-{JOBS.index(shape)}"
        job = Job(path=str(self._template / "checkpoints"), shape=shape)
        job.start()
        self.newest = None
        for step in (1, 2, 3):
            generation = Generation(term=1, step=step)
            job.save(generation, self.newest)
            job.scrub(generation)
            self.newest = generation
        # As a retired shard would stand there.
        spare = self._template / "checkpoints" / "spare"
        spare.mkdir()
        (spare / "r00000-abcdef012345").write_bytes(bytes(shape.image_bytes))
        (self._template / "outside").mkdir()
        (self._template / "outside" / "thesis").write_bytes(b"years of work")
        (self._template / "checkpoints" / "notes.txt").write_bytes(b"mine")
        (self._template / "checkpoints" / self.newest.name / "README").write_bytes(b"mine too")
        found = [(path.relative_to(self._template), path) for path in self._template.rglob("*")]
        self._folders = [str(name) for name, path in sorted(found) if path.is_dir()]
        self._files = [(str(name), path.read_bytes()) for name, path in found if path.is_file()]

    def fresh(self) -> Job:
        """A copy of it, held by term 1."""
        shutil.rmtree(self._place, ignore_errors=True)
        for name in ("", *self._folders):
            os.mkdir(f"{self._place}/{name}")
        for name, data in self._files:
            with open(f"{self._place}/{name}", "xb", buffering=0) as file:
                file.write(data)
        job = Job(path=str(self._place / "checkpoints"), shape=self.shape, term=1)
        job.run_id = job.directory.open()
        return job

    def require_foreign_untouched(self) -> None:
        """Nothing that is not ours was changed or removed, nothing was added outside."""
        for name in ("outside/thesis", "checkpoints/notes.txt"):
            require((self._place / name).exists(), f"{name} is gone")
            same = (self._place / name).read_bytes() == (self._template / name).read_bytes()
            require(same, f"{name} was changed")
        readme = [*self._place.glob("checkpoints/ckpt-*/README")]
        require([p.read_bytes() for p in readme] == [b"mine too"], "README of a generation is gone")
        require(sorted(os.listdir(self._place)) == ["checkpoints", "outside"], "new files outside")
        require(os.listdir(self._place / "outside") == ["thesis"], "new files outside")


ACTS: dict[str, Callable[[Job], object]] = {
    "start": lambda job: job.start("another"),
    "save": lambda job: job.save(Generation(term=1, step=4), None),
    "scrub": lambda job: job.scrub(Generation(term=1, step=3)),
    "retain": lambda job: job.retain(),
    "restore": lambda job: job.restore(),
    "reduce": lambda job: job.reduce(OLDEST),
    "trash": lambda job: _abort(job),
}
"""What a keeper does to a directory, one at a time."""


def _abort(job: Job) -> None:
    generation = Generation(term=1, step=9)
    folder = job.directory.create_generation(generation)
    job._shard(folder, generation, 0)
    job.directory.trash(generation)


def life(job: Job) -> None:
    """All that a process does that comes after another one: restores, saves, reads back, cleans."""
    job.start("another")
    restored = job.restore()
    following = Generation(term=job.term, step=1)
    job.directory.write_decision(job.term, 2, restored, "restored")
    job.save(following, restored)
    job.scrub(following)
    job.retain()


def require_recovery(
    job: Job, promised: Generation, *, late: Callable[[], None] = lambda: None
) -> Generation:
    """After the fault is over: the newest durable generation comes back, and saving goes on.

    `late`: what arrives at the storage behind the next start.
    """
    after = Job(path=job.path, shape=job.shape)
    after.start("after")
    late()
    require_readable(after, OLDEST)
    restored = after.restore()
    require(restored is not None, f"nothing can be restored, {promised} was durable")
    assert restored is not None
    require(restored >= promised, f"{restored} restored, {promised} was durable")
    following = Generation(term=after.term, step=1)
    after.directory.write_decision(after.term, 2, restored, "restored")
    after.save(following, restored)
    require(after.scrub(following), "the next save cannot be verified")
    require(after.restore() == following, "the next save is not the newest")
    left = [name for name in _walk(job.path) if "/trash/" in name]
    require(not left, f"left in the trash: {left[:3]}")
    return restored


def require_readable(job: Job, generation: Generation) -> None:
    """A commit reads back whole, or as weights; beside it stand no shards of the other."""
    folder = job.directory.generation_path(generation)
    if not place_of(folder).exists(os.path.join(folder, "COMMIT")):
        return
    commit = read_commit(os.path.join(folder, "COMMIT"))
    weights = holds_weights_only(commit.records)
    for rank in range(job.shape.world):
        same = read_shard(folder, rank) == image_of(generation, rank, job.shape, weights=weights)
        require(same, f"{generation}, rank {rank}: other bytes, weights only: {weights}")
    shards = {name for name in place_of(folder).names(folder) if name.startswith("shard-")}
    left = shards - files_of(commit.records)
    require(not left, f"{generation}: {sorted(left)} were left")


def _walk(path: str) -> Iterator[str]:
    for folder, _, files in os.walk(path):
        yield from (os.path.join(folder, name) for name in files)


@contextlib.contextmanager
def no_leak() -> Iterator[None]:
    """No descriptor and no thread more than before."""
    descriptors = set(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    yield
    more = {fd: _target(fd) for fd in set(os.listdir("/proc/self/fd")) - descriptors}
    more = {fd: target for fd, target in more.items() if target}  # not that of the listing
    require(not more, f"descriptors left open: {more}")
    require(threading.active_count() <= threads, f"threads left: {threading.enumerate()}")


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def tree_digest(path: Path) -> str:
    """Names and bytes of everything under a folder."""
    digest = hashlib.sha256()
    for name in sorted(_walk(str(path))):
        digest.update(name.encode() + b"\0" + Path(name).read_bytes())
    return digest.hexdigest()
