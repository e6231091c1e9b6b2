"""Checkpoint directories for people and tools: list the checkpoints and verify them.

Reads only.  Works on the directory of a live run.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autockpt.executors.image.codecs import codec as codec_of
from autockpt.executors.image.container import MAX_INDEX_BYTES, ImageIndex, chunk_digest, read_index
from autockpt.executors.image.nan_check import NanScan
from autockpt.executors.linux.memory import Arena, page_align
from autockpt.executors.protocol.messages import holds_weights_only
from autockpt.executors.protocol.retention import metrics_of
from autockpt.executors.storage.directory.marks import pin_of
from autockpt.executors.storage.directory.records import (
    COMES_BACK,
    CommitFile,
    comes_back,
    lossy_mark,
    read_commit,
    read_small,
    require_format,
)
from autockpt.executors.storage.places.choose import place_of
from autockpt.executors.storage.places.images import open_image
from autockpt.executors.throttle.rate_limit import Throttle, Unlimited
from autockpt.values.errors import AutockptError, ConfigError, CorruptCheckpointError, StorageError
from autockpt.values.generation import Generation
from autockpt.values.policy_keys.paths import is_store_url

READERS = 4
"""Threads of a restore: while some digest and copy, the others keep the storage busy."""
MOST_BASES = 16
"""The most bases in a row; writers keep far fewer (`TierPlan.chain`)."""
_MARKS = frozenset({"CORRUPT", "VERIFIED", "SUSPECT"})
_NOW = Unlimited()
_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)
"""The file is not there, or something else is: asking again will not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One generation in a directory."""

    name: str
    step: int
    world_size: int
    parent: str
    bytes: int
    """Stored bytes of all shards."""
    created_s: float
    """Seconds since 1970."""
    health: str
    state: str
    """committed, verified, corrupt, incomplete or unreadable."""
    detail: str = ""
    pinned: str = ""
    """The name under which a person keeps it; "": it has none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values that the script reported for it, by name."""
    weights_only: bool = False
    """Its optimizer state was dropped: it can be evaluated and not resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """Every chunk of every shard, read back and compared."""

    name: str
    ok: bool
    bytes: int
    """Raw bytes that matched."""
    shards: int
    problems: tuple[str, ...]
    """One sentence each: file, rank, expected and found value."""
    sick: str = ""
    """Whole, but a tensor holds NaN: rank and name; see `health`."""
    damaged: bool = False
    """Some bytes are wrong; False with problems: they could not be read now (storage)."""
    gone: bool = False
    """Its COMMIT is not there: retention deleted it, maybe while it was read, or none was written.
    Then it is no checkpoint, and nothing that was read of it says anything."""


def list_generations(directory: str) -> list[GenerationRecord]:
    """All generations, oldest first; incomplete ones are listed and marked.

    Raises ConfigError for a directory of another format, AutockptError for one that is unreadable.
    """
    require_format(directory)
    try:
        place = place_of(directory)
        if place.lacks_folder(directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
        names = place.names(directory)
    except OSError as error:
        kind = StorageError if is_store_url(directory) else AutockptError
        raise kind(f"{directory}: cannot be read: {error.strerror}") from error
    found = []
    for name in names:
        with contextlib.suppress(ConfigError):
            found.append(Generation.from_name(name))
    return [_record(directory, generation.name) for generation in sorted(found)]


def committed_names(directory: str, *, with_weights: bool = False) -> list[str]:
    """Generations that a start may resume from, if they are good, oldest first; [] if none.

    `with_weights`: generations with weights only count as well.
    """
    if not place_of(directory).is_store and not os.path.isdir(directory):
        return []
    records = list_generations(directory)
    return [
        record.name
        for record in records
        if record.state in ("committed", "verified") and (with_weights or not record.weights_only)
    ]


def require_found(run: str, kept: str, wanted: str) -> None:
    """Raises ConfigError where a run has checkpoints in `kept` that a start in `wanted` lacks."""
    there = committed_names(kept) if kept != wanted else []
    if there and not (there[-1] in committed_names(wanted) and _owner(kept) == _owner(wanted)):
        raise ConfigError(
            f"{run}: its {len(there)} checkpoints are in {kept}, and this start would look for "
            f"them in {wanted}. Resume with disk.path: {kept} (--set disk.path={kept}), move them "
            f"to {wanted} first, or begin anew without them with --fresh (attach(fresh=True))"
        )


def _owner(directory: str) -> bytes:
    """Whose the checkpoints are: a run's own random number."""
    try:
        return read_small(os.path.join(directory, "RUN"))
    except (OSError, AutockptError):
        return b""


def _record(directory: str, name: str) -> GenerationRecord:
    folder = os.path.join(directory, name)
    try:
        commit = read_commit(os.path.join(folder, "COMMIT"))
    except FileNotFoundError:
        return _unusable(name, "incomplete", "no COMMIT: interrupted, or still being written")
    except (AutockptError, OSError) as error:
        return _unusable(name, "unreadable", str(error))
    marks = _marks(folder)
    states = (("CORRUPT", "corrupt"), ("VERIFIED", "verified"))
    state = next((state for mark, state in states if mark in marks), "committed")
    return GenerationRecord(
        name=name,
        step=commit.step,
        world_size=commit.world_size,
        parent="" if commit.parent is None else commit.parent.name,
        bytes=sum(int(record.get("bytes", 0)) for record in commit.records),
        created_s=commit.created_s,
        health="suspect" if "SUSPECT" in marks else commit.health,
        state=state,
        detail="; ".join(_remarks(folder, commit)),
        pinned=_pin_of(folder),
        metrics=metrics_of(commit.records),
        weights_only=holds_weights_only(commit.records),
    )


def _remarks(folder: str, commit: CommitFile) -> Iterator[str]:
    if lost := lossy_mark(commit.records):
        yield f"LOSSY: {lost}"
    with contextlib.suppress(OSError):
        if comes_back(folder, commit):
            yield COMES_BACK


def _marks(folder: str) -> frozenset[str]:
    """The marks of a generation: by one request of a store, or by a look-up each on disk."""
    if not place_of(folder).is_store:
        return frozenset(mark for mark in _MARKS if os.path.exists(os.path.join(folder, mark)))
    with contextlib.suppress(OSError):
        return _MARKS.intersection(place_of(folder).names(folder))
    return frozenset()


def _pin_of(folder: str) -> str:
    with contextlib.suppress(OSError):
        return pin_of(folder)
    return "unreadable"


def _unusable(name: str, state: str, detail: str) -> GenerationRecord:
    return GenerationRecord(
        name=name, step=-1, world_size=0, parent="", bytes=0, created_s=0.0, health="",
        state=state, detail=detail,
    )  # fmt: skip


def load_index(folder: str, record: dict[str, object], commit: CommitFile) -> ImageIndex:
    """The index of one shard, bound to its commit.

    Raises CorruptCheckpointError, or StorageError when the storage does not answer now.
    """
    name = _plain_file(str(record.get("index", "")))
    path = os.path.join(folder, name)
    try:
        index = read_index(read_small(path, limit=MAX_INDEX_BYTES), where=path)
    except OSError as error:
        kind = CorruptCheckpointError if error.errno in _NO_FILE else StorageError
        raise kind(f"{path}: cannot be read: {error.strerror}") from error
    if index.root != record.get("root"):
        raise CorruptCheckpointError(
            f"{path}: its root is {index.root[:16]}..., COMMIT says {str(record.get('root'))[:16]}"
            "...; the index was changed or belongs to another generation"
        )
    if index.run_id != commit.run_id or index.generation != commit.generation:
        raise CorruptCheckpointError(f"{path}: belongs to {index.generation} of {index.run_id}")
    return index


def shard_path(folder: str, record: dict[str, object]) -> str:
    """Path of a shard file; names with separators are refused."""
    return os.path.join(folder, _plain_file(str(record.get("file", ""))))


def _plain_file(name: str) -> str:
    if "\0" in name or not name or "/" in name or name.startswith(".") or len(name) > 128:
        raise CorruptCheckpointError(f"{name!r} is no shard or index name")
    return name


class ShardFileSource:
    """Reads and checks chunks of one shard file; buffers are reused, one per reader thread."""

    workers = READERS

    def __init__(
        self,
        path: str,
        index: ImageIndex,
        *,
        direct: bool = True,
        base: "ShardFileSource | None" = None,
    ) -> None:
        """`base`: of the generation that the index names; it is closed with this one."""
        self.index = index
        self.path = path
        self._base = base
        try:
            self._codec = codec_of(index.codec)
        except ConfigError as error:  # the root does not bind it: it says how, not what
            raise CorruptCheckpointError(f"{path}: its index names an {error}") from None
        self._reader = open_image(path, direct=direct)
        expected = (
            max((c.offset + c.length for c in index.stored), default=0)
            if index.stored
            else index.image_bytes
        )
        if self._reader.length < expected:
            length = self._reader.length
            self.close()
            raise CorruptCheckpointError(f"{path}: {length} bytes, expected {expected}; truncated")

    def head(self) -> memoryview | None:
        """Header and boundary group, verified; None when they have no digest of their own."""
        index = self.index
        if not index.head_bytes or index.stored:
            return None
        buffer = Arena.anonymous(page_align(index.head_bytes))
        data = buffer.view[: index.head_bytes]
        self._reader.read_at(0, data)
        index.check_head(data, source=self.path)
        return data

    @property
    def room_bytes(self) -> int:
        """Memory for one chunk, and for the same of every base, page-aligned."""
        return self._levels * self._room

    @property
    def _room(self) -> int:
        """For a chunk as it is stored."""
        return page_align(min(self.index.chunk_bytes, self.index.image_bytes))

    @property
    def _levels(self) -> int:
        return 1 + (0 if self._base is None else self._base._levels)

    def expect(self, chunks: Sequence[int]) -> None:
        """Do nothing: the reader has threads enough."""

    def read(
        self, chunk: int, memory: memoryview,
        look: Callable[[int, memoryview], None] | None = None,
    ) -> memoryview:  # fmt: skip
        """The raw bytes of a chunk, verified, in page-aligned memory of `room_bytes`.

        `look(offset, piece)` sees the bytes before they are verified.  Raises
        CorruptCheckpointError or StorageError.
        """
        start, stop = self.index.chunk_range(chunk)
        if not self.index.stored:
            data = memory[: stop - start]
            self._reader.read_at(start, data)
        else:
            data = self._read_encoded(chunk, stop - start, memory)
        self.index.check(chunk, data, source=self.path, look=look)
        return data

    def _read_encoded(self, chunk: int, raw_bytes: int, memory: memoryview) -> memoryview:
        place = self.index.stored[chunk]
        least = 0 if place.base else 1
        if not least <= place.length <= raw_bytes or place.offset < 0:
            raise CorruptCheckpointError(
                f"{self.path}: chunk {chunk} claims {place.length} stored bytes at "
                f"{place.offset} for {raw_bytes}"
            )
        old = self._base_chunk(chunk, place.base, memory[self._room :]) if place.base else None
        if not place.length:
            return old or memoryview(b"")
        frame = memory[: page_align(place.length)]
        available = self._reader.length - place.offset
        self._reader.read_at(place.offset, frame[: min(len(frame), available)])
        frame = frame[: place.length]
        if place.length == raw_bytes:
            return frame
        if chunk_digest(frame) != place.digest:
            raise CorruptCheckpointError(f"{self.path}: chunk {chunk}: stored bytes changed")
        return memoryview(self._codec.decode(frame, raw_bytes, base=old))

    def _base_chunk(self, chunk: int, digest: str, memory: memoryview) -> memoryview:
        base = self._base
        if base is None or base.index.digests[chunk] != digest:
            got = "none is open" if base is None else f"{base.path} has {base.index.digests[chunk]}"
            raise CorruptCheckpointError(
                f"{self.path}: chunk {chunk} needs the base of digest {digest}, {got}"
            )
        return base.read(chunk, memory)

    def close(self) -> None:
        """Close the file, and the files of its bases."""
        if self._base is not None:
            self._base.close()
        self._reader.close()


def open_shard(folder: str, record: dict[str, object], commit: CommitFile) -> ShardFileSource:
    """A shard file of a commit, with the shards that it is a difference to.

    Raises CorruptCheckpointError or StorageError.
    """
    return _open_shard(folder, record, commit, MOST_BASES)


def _open_shard(
    folder: str, record: dict[str, object], commit: CommitFile, most_bases: int
) -> ShardFileSource:
    index = load_index(folder, record, commit)
    base = None if index.base is None else _open_base(folder, index, index.base, most_bases)
    try:
        return ShardFileSource(shard_path(folder, record), index, base=base)
    except BaseException:
        if base is not None:
            base.close()
        raise


def _open_base(
    folder: str, index: ImageIndex, named: Generation, most_bases: int
) -> ShardFileSource:
    """The shard of the same rank in the generation that an index names as its base."""
    where = f"{folder}: rank {index.rank} is stored as a difference to {named}"
    if not most_bases:
        raise CorruptCheckpointError(f"{where}, which is base number {MOST_BASES + 1} in a row")
    other = os.path.join(os.path.dirname(folder), named.name)
    try:
        commit = read_commit(os.path.join(other, "COMMIT"))
    except FileNotFoundError:
        raise CorruptCheckpointError(
            f"{where}, and {other} has no COMMIT; put it back, or restore an older generation"
        ) from None
    if index.rank >= len(commit.records):
        raise CorruptCheckpointError(f"{where}, which has {len(commit.records)} ranks only")
    base = _open_shard(other, commit.records[index.rank], commit, most_bases - 1)
    same = ("run_id", "image_bytes", "chunk_bytes")
    if any(getattr(base.index, name) != getattr(index, name) for name in same):
        base.close()
        raise CorruptCheckpointError(f"{where}, which holds an image of another run or size")
    return base


def verify_generation(
    directory: str,
    name: str,
    *,
    gate: Throttle = _NOW,
    expect: Callable[[int], None] = lambda nbytes: None,
) -> VerifyResult:
    """Reads a committed generation back and compares every chunk.

    Every chunk asks `gate` first, so that a background scrub yields to the training.  `expect`
    hears the bytes of each shard before it is read, times the shards still to come.
    """
    folder = os.path.join(directory, name)
    try:
        commit = read_commit(os.path.join(folder, "COMMIT"))
    except (AutockptError, OSError) as error:
        if lacks_commit(folder):
            return _gone(name)
        return VerifyResult(
            name=name, ok=False, bytes=0, shards=0, problems=(str(error),),
            damaged=isinstance(error, CorruptCheckpointError),
        )  # fmt: skip
    reading = _Reading(gate)
    for rank, record in enumerate(commit.records):
        try:
            source = open_shard(folder, record, commit)
        except (AutockptError, OSError) as error:
            reading.failed(rank, error)
            continue
        expect(source.index.image_bytes * (len(commit.records) - rank))
        with contextlib.closing(source):
            reading.shard(rank, source)
    if lacks_commit(folder):
        return _gone(name)
    if reading.problems and is_replaced(folder, commit):
        return verify_generation(directory, name, gate=gate, expect=expect)
    return VerifyResult(
        name=name, ok=not reading.problems, bytes=reading.bytes, shards=len(commit.records),
        problems=tuple(reading.problems), damaged=reading.damaged, sick=reading.sick,
    )  # fmt: skip


def lacks_commit(folder: str) -> bool:
    """Whether there is no COMMIT: it goes first, and shards are written over before they go."""
    with contextlib.suppress(OSError):  # storage that does not answer says nothing
        return not place_of(folder).exists(os.path.join(folder, "COMMIT"))
    return False


def is_replaced(folder: str, commit: CommitFile) -> bool:
    """Whether the run has written the shards again since, and files of `commit` may be gone."""
    with contextlib.suppress(AutockptError, OSError):
        return read_commit(os.path.join(folder, "COMMIT")) != commit
    return False


def _gone(name: str) -> VerifyResult:
    return VerifyResult(
        name=name, ok=False, bytes=0, shards=0, problems=("no COMMIT: it is no checkpoint",),
        gone=True,
    )  # fmt: skip


class _Reading:
    """What comes of reading the shards of a generation."""

    def __init__(self, gate: Throttle) -> None:
        self._gate = gate
        self.bytes = 0
        self.problems: list[str] = []
        self.damaged = False
        self.sick = ""

    def failed(self, rank: int, error: Exception) -> None:
        """A file or a chunk that is not what it must be, or cannot be read now."""
        self.damaged |= isinstance(error, CorruptCheckpointError)
        self.problems.append(f"rank {rank}: {error}")

    def shard(self, rank: int, source: ShardFileSource) -> None:
        """All chunks; a bad one does not end it."""
        index = source.index
        scan = NanScan(index.image_bytes, beyond=index.head_bytes)
        buffer = Arena.anonymous(source.room_bytes)
        for chunk in range(len(index.digests)):
            start, stop = index.chunk_range(chunk)
            self._gate.wait(stop - start)

            def look(offset: int, piece: memoryview, start: int = start) -> None:
                scan.take(start + offset, piece)

            try:
                self.bytes += len(source.read(chunk, buffer.view, look))
            except AutockptError as error:
                self.failed(rank, error)
        buffer.close()
        if scan.found and not self.sick and not self.problems:
            self.sick = f"rank {rank} has NaN in {scan.found}"
