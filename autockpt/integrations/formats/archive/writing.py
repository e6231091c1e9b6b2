"""Committed generations into an archive, one after the other; originals are only read.

Each worker holds a block of at most `BLOCK_ELEMENTS` of one group in memory, with its base and its
encoded result.
"""

import concurrent.futures
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from autockpt import new_files
from autockpt.executors.image.codecs.lossy import coding
from autockpt.executors.image.codecs.lossy.coding import Coded, Method
from autockpt.executors.image.codecs.lossy.thresholds import PUBLISHED, Thresholds
from autockpt.executors.image.dtypes import dtype_name
from autockpt.executors.image.layout.boxes import Box
from autockpt.executors.storage.directory.records import lossy_mark
from autockpt.integrations.formats.archive.member_file import MemberWriter
from autockpt.integrations.formats.archive.reading import NAME, SUFFIX, Archive, is_archive
from autockpt.integrations.formats.archive.records import (
    METHODS,
    THRESHOLDS,
    ArchiveFile,
    Codec,
    Member,
    StoredBlock,
    StoredGroup,
    StoredTensor,
)
from autockpt.integrations.formats.archive.sources import Group, Source
from autockpt.integrations.formats.tree.lazy_tree import LazyTensor
from autockpt.values.errors import ConfigError, StorageError
from autockpt.values.generation import Generation
from autockpt.values.record import to_json

BLOCK_ELEMENTS = 2**22
"""Elements of one tensor per block: enough for sound statistics, some 200 MB with all results."""
WORKERS = 2
"""Blocks at a time; torch and zstd work without the interpreter's lock."""
FULL_EVERY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """A member that was written."""

    generation: str
    step: int
    codec: Codec
    base: str
    """"": it stands alone."""
    raw_bytes: int
    stored_bytes: int
    lossy: bool
    seconds: float

    @property
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return self.raw_bytes / max(1, self.stored_bytes)


def open_archive(path: str, about: ArchiveFile) -> Archive:
    """The archive at `path`, made if there is none.

    Raises ConfigError for another run's, or one that was begun with another codec.
    """
    if not is_archive(path):
        if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
            raise ConfigError(f"{path}: exists and is no archive; name another destination")
        try:
            new_files.make_directory(path)
            _write_new(os.path.join(path, NAME), to_json(about))
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    archive = Archive(path)
    if archive.about != about:
        archive.close()
        raise ConfigError(
            f"{path}: is an archive of run {archive.about.run_id} with codec "
            f"{archive.about.codec}, full every {archive.about.full_every}; expected run "
            f"{about.run_id}, {about.codec}, {about.full_every}; name another destination"
        )
    return archive


def _write_new(path: str, text: str) -> None:
    """All of it, or nothing is left."""
    with open(path, "x", encoding="utf-8", opener=new_files.readable) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.unlink(path)
            raise


def add_generation(
    archive: Archive,
    folder: str,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Archived:
    """Adds the committed generation in `folder`, which must be newer than all that are there.

    Raises ConfigError, CorruptCheckpointError or StorageError; the archive is as it was then.
    """
    began = time.monotonic()
    name = os.path.basename(os.path.abspath(folder))
    with contextlib.closing(Source(folder)) as source:
        commit = source.commit
        base, codec = _base_of(archive, name)
        groups = list(source.groups())
        raw_bytes = sum(tensor.nbytes for group in groups for _, tensor in group.tensors)
        elements = sum(g.tensors[0][1].nbytes // 4 for g in groups if len(g.tensors) == 3)
        thresholds = THRESHOLDS.get(codec, PUBLISHED).for_parameters(elements)
        encoder = _Encoder(archive, base, METHODS[codec], thresholds)
        writer = MemberWriter(os.path.join(archive.path, name + SUFFIX))
        try:
            stored = _write_groups(writer, encoder, groups, lambda done: progress(done, raw_bytes))
            member = Member(
                generation=name, step=commit.step, codec=codec, base=base,
                base_digest=archive.open(base).digest if base else "", raw_bytes=raw_bytes,
                created_s=commit.created_s, groups=tuple(stored), ranks=source.ranks(),
                lost_before=lossy_mark(commit.records),
            )  # fmt: skip
            stored_bytes = writer.finish(member)
        finally:
            writer.discard()
    return Archived(
        generation=name, step=commit.step, codec=codec, base=base, raw_bytes=raw_bytes,
        stored_bytes=stored_bytes, lossy=member.lossy, seconds=time.monotonic() - began,
    )  # fmt: skip


def _base_of(archive: Archive, name: str) -> tuple[str, Codec]:
    """(predecessor, codec) of a new member: ("", "none") when a full one is due."""
    names = archive.names()
    if names and Generation.from_name(names[-1]) >= Generation.from_name(name):
        raise ConfigError(
            f"{archive.path}: ends with {names[-1]}, and {name} is not newer; members are added "
            "in the order of the training"
        )
    if not names or len(archive.chain(names[-1])) >= archive.about.full_every:
        return "", "none"
    return names[-1], archive.about.codec


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows [start, stop) of a group."""

    group: Group
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Encoder:
    """Reads, encodes and checks a block; called from several threads."""

    archive: Archive
    base: str
    method: Method
    thresholds: Thresholds

    def __call__(self, block: _Block) -> Coded:
        """The frames of a block."""
        tensors = [_rows(tensor, block) for _, tensor in block.group.tensors]
        base = self._base(block, tensors[0])
        if len(tensors) == 3:
            weight, first, second = tensors
            return coding.encode_group(weight, first, second, base, self.method, self.thresholds)
        return coding.encode_lossless(tensors[0], base)

    def _base(self, block: _Block, like: torch.Tensor) -> torch.Tensor | None:
        """The same rows as the predecessor restores them: the loop is closed here."""
        if not self.base:
            return None
        key, tensor = block.group.tensors[0]
        form = self.archive.form(self.base, key)
        if form is None or (form.dtype, form.shape) != (tensor.dtype, tensor.shape):
            return None
        rows = self.archive.rows(self.base, key, block.start, block.stop)
        return rows if rows.shape == like.shape else None


def _rows(tensor: LazyTensor, block: _Block) -> torch.Tensor:
    if not tensor.shape:
        return tensor.read().reshape(1)
    rest = tensor.shape[1:]
    offset, shape = (block.start, *(0 for _ in rest)), (block.stop - block.start, *rest)
    return tensor.part(Box(offset=offset, shape=shape))


def _blocks(group: Group) -> list[_Block]:
    shape = group.tensors[0][1].shape or (1,)
    width = 1
    for size in shape[1:]:
        width *= size
    rows = max(1, BLOCK_ELEMENTS // max(1, width))
    starts = range(0, shape[0], rows) or (0,)
    return [_Block(group, start, min(start + rows, shape[0])) for start in starts]


def _write_groups(
    writer: MemberWriter, encoder: _Encoder, groups: list[Group], tell: Callable[[int], None]
) -> Iterator[StoredGroup]:
    blocks = [block for group in groups for block in _blocks(group)]
    found: dict[int, StoredGroup] = {}
    done = 0
    for block, coded in zip(blocks, _in_order(encoder, blocks), strict=True):
        known = found.setdefault(id(block.group), _empty(block.group))
        frames = tuple(writer.append(data) for data in coded.frames)
        stored = StoredBlock(start=block.start, stop=block.stop, frames=frames)
        found[id(block.group)] = replace(
            known, blocks=(*known.blocks, stored), lossy=known.lossy or coded.lossy
        )
        done += sum(tensor.numel() * tensor.element_size() for tensor in coded.tensors)
        tell(done)
    return iter(found.values())


def _empty(group: Group) -> StoredGroup:
    tensors = tuple(
        StoredTensor(key=key, dtype=dtype_name(tensor.dtype), shape=tensor.shape)
        for key, tensor in group.tensors
    )
    return StoredGroup(tensors=tensors, blocks=(), lossy=False)


def _in_order(encoder: _Encoder, blocks: Iterable[_Block]) -> Iterator[Coded]:
    """Encoded by `WORKERS` threads; never more than one finished block waits beside them."""
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        waiting: deque[concurrent.futures.Future[Coded]] = deque()
        for block in blocks:
            waiting.append(pool.submit(encoder, block))
            if len(waiting) > WORKERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
