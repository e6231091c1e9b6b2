"""An archive, open: any rows of any tensor of any member, decoded back to the last full one.

Every frame is checked against the digest of its decoded bytes at the time of writing.  So a damaged
or exchanged predecessor is found where it is used.  May be used from threads.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch

from autockpt.executors.image.codecs.lossy import coding, frame
from autockpt.executors.image.codecs.lossy.frame import Form
from autockpt.executors.image.dtypes import true_dtype
from autockpt.executors.image.layout.boxes import Box
from autockpt.integrations.formats.archive.member_file import MemberFile
from autockpt.integrations.formats.archive.records import (
    MAX_CHAIN,
    ArchiveFile,
    StoredBlock,
    StoredGroup,
    StoredTensor,
)
from autockpt.values.errors import (
    ConfigError,
    CorruptCheckpointError,
    NoCheckpointError,
    StorageError,
)
from autockpt.values.generation import Generation
from autockpt.values.record import from_json

NAME = "ARCHIVE"
SUFFIX = ".ackpt"
HELD_BLOCKS = 4
"""Decoded blocks that are kept: rows of one block are asked for one tensor after the other."""


def is_archive(path: str) -> bool:
    """Whether a directory is an archive."""
    return os.path.isfile(os.path.join(path, NAME))


def _order(name: str) -> tuple[bool, Generation | str]:
    """Sort the names of generations as generations, behind names that are none."""
    try:
        return True, Generation.from_name(name)
    except ConfigError:
        return False, name


class Archive:
    """Reads; close it when done."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if `path` is no archive, StorageError."""
        self.path = path
        try:
            with open(os.path.join(path, NAME), "rb") as file:
                text = file.read(2**16)
        except OSError as error:
            raise ConfigError(f"{path}: no archive: {error.strerror}") from error
        self.about = from_json(ArchiveFile, text, where=os.path.join(path, NAME))
        self._files: dict[str, MemberFile] = {}
        self._places: dict[str, dict[str, tuple[StoredGroup, int]]] = {}
        self._held: OrderedDict[tuple[str, str, int], tuple[torch.Tensor, ...]] = OrderedDict()
        self._lock = threading.RLock()

    def names(self) -> list[str]:
        """Generations in it, oldest first.  Raises StorageError."""
        try:
            found = os.listdir(self.path)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error.strerror}") from error
        names = [name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX)]
        return sorted(names, key=_order)

    def newest(self) -> str:
        """Raises NoCheckpointError for an empty archive."""
        names = self.names()
        if not names:
            raise NoCheckpointError(f"{self.path}: holds no generation yet")
        return names[-1]

    def open(self, name: str) -> MemberFile:
        """A member.  Raises ConfigError for an unknown one, CorruptCheckpointError."""
        with self._lock:
            if name not in self._files:
                Generation.from_name(name)
                if name not in self.names():
                    raise ConfigError(
                        f"{self.path}: holds no {name}; there are: {', '.join(self.names())}"
                    )
                file = MemberFile(os.path.join(self.path, name + SUFFIX))
                self._files[name] = file
                if file.member.generation != name:
                    raise CorruptCheckpointError(f"{file.path}: holds {file.member.generation}")
                self._places[name] = {
                    tensor.key: (group, place)
                    for group in file.member.groups
                    for place, tensor in enumerate(group.tensors)
                }
            return self._files[name]

    def chain(self, name: str) -> list[MemberFile]:
        """Return a member and the members that it needs, itself first.

        Raises CorruptCheckpointError when one is missing or another one than it was made against.
        """
        found = [self.open(name)]
        while found[-1].member.base:
            member = found[-1].member
            if len(found) > MAX_CHAIN or member.base >= member.generation:
                raise CorruptCheckpointError(f"{found[-1].path}: a chain without an end")
            try:
                base = self.open(member.base)
            except (ConfigError, StorageError) as error:
                raise CorruptCheckpointError(
                    f"{found[-1].path}: needs {member.base}, which is gone: {error}"
                ) from None
            if base.digest != member.base_digest:
                raise CorruptCheckpointError(
                    f"{found[-1].path}: was made against another {base.path}"
                )
            found.append(base)
        return found

    def form(self, name: str, key: str) -> Form | None:
        """Of a tensor of a member; None when it has none of this key."""
        self.open(name)
        if key not in self._places[name]:
            return None
        group, place = self._places[name][key]
        return form_of(group.tensors[place])

    def part(self, name: str, key: str, box: Box) -> torch.Tensor:
        """A box of a tensor."""
        form = self.form(name, key)
        if form is None:
            raise CorruptCheckpointError(f"{self.path}: {name} holds no {key}")
        if not form.shape:
            return self.rows(name, key, 0, 1).reshape(())
        start, stop = box.offset[0], box.offset[0] + box.shape[0]
        rest = tuple(
            slice(at, at + size) for at, size in zip(box.offset[1:], box.shape[1:], strict=True)
        )
        return self.rows(name, key, start, stop)[(slice(None), *rest)]

    def rows(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop); a tensor without dimensions has one."""
        group, place = self._places[name][key]
        parts = []
        for number, block in enumerate(group.blocks):
            first, last = max(start, block.start), min(stop, block.stop)
            if first < last or (block.start == block.stop == start == stop):
                tensors = self._decoded(name, group, number)
                parts.append(tensors[place][first - block.start : last - block.start])
        found = torch.cat(parts) if len(parts) != 1 else parts[0]
        if found.shape[0] != stop - start:
            raise CorruptCheckpointError(f"{self.path}: {name} lacks rows of {key}")
        return found

    def _decoded(self, name: str, group: StoredGroup, number: int) -> tuple[torch.Tensor, ...]:
        key = name, group.tensors[0].key, number
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        tensors = tuple(self._frames(name, group, group.blocks[number]))
        with self._lock:
            self._held[key] = tensors
            while len(self._held) > HELD_BLOCKS:
                self._held.popitem(last=False)
        return tensors

    def _frames(self, name: str, group: StoredGroup, block: StoredBlock) -> Iterator[torch.Tensor]:
        """The tensors of a block, each with a first dimension."""
        forms = [block_form(tensor, block) for tensor in group.tensors]
        file = self.open(name)
        if len(block.frames) not in (1, len(forms)):
            raise CorruptCheckpointError(f"{file.path}: a block of {len(block.frames)} frames")
        each = [forms] if len(block.frames) == 1 else [[form] for form in forms]
        for place, its in zip(block.frames, each, strict=True):
            data = file.frame(place)
            base = self._base(file, group, block) if frame.has_base(data) else None
            try:
                yield from coding.decode(data, its, base)
            except CorruptCheckpointError as error:
                raise CorruptCheckpointError(
                    f"{file.path}: {group.tensors[0].key}, rows {block.start} to {block.stop}: "
                    f"{error}"
                ) from None

    def _base(
        self, file: MemberFile, group: StoredGroup, block: StoredBlock
    ) -> torch.Tensor | None:
        base, key = file.member.base, group.tensors[0].key
        if not base or self.form(base, key) is None:
            return None
        return self.rows(base, key, block.start, block.stop)

    def verify(self, name: str) -> int:
        """Decodes all of a member; its raw bytes.  Raises CorruptCheckpointError."""
        self.chain(name)
        count = 0
        for group in self.open(name).member.groups:
            for number in range(len(group.blocks)):
                tensors = self._decoded(name, group, number)
                count += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return count

    def close(self) -> None:
        """Lets the files go."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def form_of(tensor: StoredTensor) -> Form:
    """Raises CorruptCheckpointError for a dtype that this torch lacks, or no shape."""
    try:
        dtype = true_dtype(tensor.dtype)
    except ConfigError as error:
        raise CorruptCheckpointError(f"{tensor.key}: {error}") from None
    if any(size < 0 for size in tensor.shape):
        raise CorruptCheckpointError(f"{tensor.key}: {tensor.shape} is no shape")
    return Form(dtype=dtype, shape=tensor.shape)


def block_form(tensor: StoredTensor, block: StoredBlock) -> Form:
    """Of a tensor's rows in a block.  Raises CorruptCheckpointError when it has no such rows."""
    form = form_of(tensor)
    rows: Sequence[int] = form.shape[:1] or (1,)
    if not 0 <= block.start <= block.stop <= rows[0]:
        raise CorruptCheckpointError(f"{tensor.key}: has no rows {block.start} to {block.stop}")
    return Form(dtype=form.dtype, shape=(block.stop - block.start, *form.shape[1:]))
