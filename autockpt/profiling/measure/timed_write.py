"""One write as a keeper does it, timed: the pipeline of a run on the job's bytes, in its directory.

Digest, codec, writers, O_DIRECT and fsync are the code of
`executors/keeper/saving/shard_writer.py`; with several ranks on a node as many pipelines run at
once.  Files lose their names as soon as they are open, so that a killed search leaves nothing
behind.  If one is killed in that moment, the next search sweeps its files (`probes/clean.py`).
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autockpt import new_files
from autockpt.executors.image.layout.plan import element_kind
from autockpt.executors.keeper.saving.shard_writer import PersistTarget, ShardOutcome, ShardPipeline
from autockpt.profiles.probes import clean
from autockpt.tuner.search.space import Candidate
from autockpt.values.errors import StorageError

LONGEST_WRITE_S = 120.0
"""A write that hangs ends the search instead of holding it for ever."""
_UNLINK_POLL_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One measured write of all ranks of this node."""

    seconds: float
    cpu_s: float
    """Of this process, all threads."""
    stored_bytes: int


@contextlib.contextmanager
def target_directory(directory: str) -> Iterator[str]:
    """The directory of the checkpoints, made and taken away again where a run would make it.

    Raises StorageError when it cannot be made.
    """
    path = Path(directory)
    missing = [p for p in (path, *path.parents) if not p.exists()]
    try:
        new_files.make_directory(path)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be made: {error.strerror}; name another directory in disk.path"
        ) from error
    clean.sweep(str(path))
    try:
        yield str(path)
    finally:
        for made in missing:
            with contextlib.suppress(OSError):  # it is in use
                made.rmdir()


def measure(directory: str, images: Sequence[memoryview], candidate: Candidate) -> Write:
    """Writes an image a rank durably, all at once.  Raises StorageError when one cannot be."""
    shards = [_Shard(image, candidate) for image in images]
    with contextlib.ExitStack() as stack:
        paths = [
            stack.enter_context(clean.probe_file(directory, named=True)) for _ in range(len(shards))
        ]
        cpu_s, began = time.process_time(), time.perf_counter()
        for shard, path in zip(shards, paths, strict=True):
            shard.start(path)
        _unlink_when_open(paths, shards)
        for shard in shards:
            shard.wait(began + LONGEST_WRITE_S)
        outcomes = [shard.outcome_or_raise() for shard in shards]
        ended = max(shard.ended_s for shard in shards)
        return Write(
            seconds=ended - began,
            cpu_s=time.process_time() - cpu_s,
            stored_bytes=sum(outcome.stored_bytes for outcome in outcomes),
        )


def _unlink_when_open(paths: Sequence[str], shards: Sequence["_Shard"]) -> None:
    """Takes the names away: the pipelines go on by their descriptors."""
    left, until_s = set(paths), time.perf_counter() + LONGEST_WRITE_S
    while left and not all(shard.done.is_set() for shard in shards):
        if time.perf_counter() > until_s:
            return  # not even opened
        for path in list(left):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                left.discard(path)
        time.sleep(_UNLINK_POLL_S)


@dataclass(slots=True)
class _Shard:
    """A sealed image and the pipeline that makes it durable."""

    image: memoryview
    candidate: Candidate
    done: threading.Event = field(default_factory=threading.Event)
    ended_s: float = 0.0
    outcome: ShardOutcome | None = None
    error: Exception | None = None
    pipeline: ShardPipeline | None = None

    def start(self, path: str) -> None:
        """Offers every byte at once."""
        way = self.candidate
        self.pipeline = ShardPipeline(
            self.image,
            chunk_bytes=way.chunk_bytes,
            available=lambda: len(self.image),
            streaming=True,
            known=None,
            target=PersistTarget(
                path=path,
                prepare=lambda: None,
                writers=way.writers,
                direct_io=way.direct_io,
                codec=way.codec,
                codec_ranges=((0, len(self.image), element_kind("F32").code, 0),),
            ),
            on_digested=lambda digests: None,
            on_persisted=self._persisted,
            on_failed=self._failed,
        )
        self.pipeline.sealed()
        self.pipeline.start()

    def wait(self, until_s: float) -> None:
        """Until it is over; one that hangs is left to its threads, which end with the process."""
        if self.done.wait(max(0.0, until_s - time.perf_counter())) and self.pipeline is not None:
            self.pipeline.cancel()
            self.pipeline.join()

    def outcome_or_raise(self) -> ShardOutcome:
        """Return the outcome of the write.  Raises StorageError."""
        if not self.done.is_set():
            raise StorageError(
                f"a write of {len(self.image)} bytes ({self.candidate}) was not durable after "
                f"{LONGEST_WRITE_S:g} s; the storage hangs or is far too slow to be searched"
            )
        if self.outcome is None:
            raise StorageError(f"{self.candidate}: {self.error}")
        return self.outcome

    def _persisted(self, outcome: ShardOutcome) -> None:
        self.ended_s, self.outcome = time.perf_counter(), outcome
        self.done.set()

    def _failed(self, error: Exception) -> None:
        self.ended_s, self.error = time.perf_counter(), error
        self.done.set()
