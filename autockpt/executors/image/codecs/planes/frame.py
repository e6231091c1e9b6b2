"""The header of a frame of planes: the groups and runs of the chunk, and the length of every plane.

    "PL" 2 0  groups: u16  runs: u16              8 bytes, little-endian
    per group: kind: u8                           see `Kind.code`
    per group: low: u8                            see `Group.low`
    per run:   length: u32  group: u16            in the order of the chunk, as long as it together
    per part:  coding: u8  length: u32            groups in order, from the lowest byte up
    zeros                                         to a multiple of 8: numpy is slow beside them

A group holds the elements of its runs one after another.  Frames of the first version ("PL" 1 0)
have no `low`, which is then 0, and no zeros.  They turn floating elements as a whole.  The decoder
must always read them.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autockpt.executors.image.codecs.planes.elements import Bytes, Words, words_of
from autockpt.executors.image.layout.runs import Kind, Run, kind_of
from autockpt.values.errors import ConfigError, CorruptCheckpointError

_HEAD, _RUN, _PART = struct.Struct("<4sHH"), struct.Struct("<IH"), struct.Struct("<BI")
_MAGIC, _FIRST = b"PL\x02\x00", b"PL\x01\x00"
AS_IS, CODED, NIBBLES, SEVENS = 0, 1, 2, 3
"""How a part is stored: as it is, as a zstd frame, or packed (`packing.py`)."""
MAX_RUNS = 2**16 - 1


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that are encoded together."""

    kind: Kind
    places: tuple[tuple[int, int], ...]
    """[start, stop) in the chunk."""
    low: int = 0
    """So many low bytes of every element stay together: 0, half of them or all."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of an element in each part: the low ones together, then planes of one."""
        planes = (1,) * (self.kind.width - self.low)
        return (self.low, *planes) if self.low else planes

    @property
    def count(self) -> int:
        """Elements."""
        return sum(stop - start for start, stop in self.places) // self.kind.width

    def pieces(self, data: memoryview | Bytes) -> Iterator[tuple[int, Words]]:
        """(first element within the group, elements) of every run."""
        at = 0
        for start, stop in self.places:
            words = words_of(data[start:stop], self.kind)
            yield at, words
            at += len(words)


def grouped(runs: Sequence[Run], nbytes: int) -> tuple[list[tuple[Run, int]], list[Group]]:
    """(runs with the number of their group, groups); neighbours of one group are one run."""
    numbers: dict[tuple[Kind, int], int] = {}
    places: list[list[tuple[int, int]]] = []
    table: list[tuple[Run, int]] = []
    at = 0
    for run in runs:
        if not run.nbytes:
            continue
        number = numbers.setdefault((run.kind, run.group), len(numbers))
        if number == len(places):
            places.append([])
        places[number].append((at, at + run.nbytes))
        table.append((run, number))
        at += run.nbytes
    if at != nbytes:
        raise ConfigError(f"runs of {at} bytes for a chunk of {nbytes}")
    kinds = [kind for kind, _ in numbers]
    return table, [Group(k, tuple(rows)) for k, rows in zip(kinds, places, strict=True)]


def header_size(groups: Sequence[Group], table: Sequence[tuple[Run, int]]) -> int:
    """Bytes of a header."""
    parts = sum(len(group.widths) for group in groups)
    return _aligned(_HEAD.size + 2 * len(groups) + _RUN.size * len(table) + _PART.size * parts)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def pack_header(
    groups: Sequence[Group], table: Sequence[tuple[Run, int]], parts: Sequence[tuple[int, int]]
) -> bytes:
    """`parts`: of every part its coding and its length."""
    header = b"".join([
        _HEAD.pack(_MAGIC, len(groups), len(table)),
        bytes(group.kind.code for group in groups),
        bytes(group.low for group in groups),
        *(_RUN.pack(run.nbytes, number) for run, number in table),
        *(_PART.pack(*row) for row in parts),
    ])  # fmt: skip
    return header.ljust(_aligned(len(header)), b"\0")


@dataclass(frozen=True, slots=True)
class Header:
    """The checked header of a frame."""

    groups: list[Group]
    parts: list[tuple[int, int]]
    """(coding, length) of every part, in the order of the groups."""
    at: int
    """Where the parts begin."""
    whole: bool
    """Floating elements were turned as a whole."""


def parse_header(frame: memoryview, raw_bytes: int, base_bytes: int) -> Header:
    """Raises CorruptCheckpointError."""
    try:
        kinds = kinds_of(frame)
        magic, _, runs = _HEAD.unpack_from(frame)
        at = _HEAD.size + len(kinds)
        lows = bytes(len(kinds))
        if magic == _MAGIC:
            lows = bytes(_exactly(frame, at, len(kinds)))
            at += len(kinds)
        rows = list(_RUN.iter_unpack(_exactly(frame, at, _RUN.size * runs)))
        at += _RUN.size * runs
        made = _groups(kinds, lows, rows, raw_bytes, base_bytes)
        count = sum(len(group.widths) for group in made)
        table = list(_PART.iter_unpack(_exactly(frame, at, _PART.size * count)))
        at += _PART.size * count
        at = _aligned(at) if magic == _MAGIC else at
        _require_lengths(made, table, len(frame) - at)
    except (ValueError, ConfigError, struct.error) as error:
        raise CorruptCheckpointError(f"planes frame: {error}") from None
    return Header(made, table, at, magic == _FIRST)


def kinds_of(frame: memoryview) -> list[Kind]:
    """Of every group.  Raises ValueError, ConfigError or struct.error for a malformed header."""
    magic, groups, _ = _HEAD.unpack_from(frame)
    if magic not in (_MAGIC, _FIRST):
        raise ValueError(f"begins with {magic!r}")
    return [kind_of(code) for code in _exactly(frame, _HEAD.size, groups)]


def _exactly(frame: memoryview, at: int, nbytes: int) -> memoryview:
    if at + nbytes > len(frame):
        raise ValueError(f"ends at {len(frame)} bytes, its header needs {at + nbytes}")
    return frame[at : at + nbytes]


def _groups(
    kinds: list[Kind], lows: bytes, rows: list[tuple[int, int]], raw_bytes: int, base_bytes: int
) -> list[Group]:
    total = sum(length for length, _ in rows)
    if total != raw_bytes:
        raise ValueError(f"is of a chunk of {total} bytes, expected {raw_bytes}")
    if any(kind.delta for kind in kinds) and base_bytes != raw_bytes:
        raise ValueError(f"needs a base of {raw_bytes} bytes, got {base_bytes}")
    places: list[list[tuple[int, int]]] = [[] for _ in kinds]
    ends = np.cumsum([0, *(length for length, _ in rows)]).tolist()
    for (start, stop), (_, number) in zip(pairwise(ends), rows, strict=True):
        if number >= len(kinds) or (stop - start) % kinds[number].width:
            raise ValueError(f"a run of {stop - start} bytes in group {number}")
        places[number].append((start, stop))
    for kind, low in zip(kinds, lows, strict=True):
        if low not in (0, kind.width // 2, kind.width):
            raise ValueError(f"{low} low bytes of elements of {kind.width}")
    return [
        Group(kind, tuple(mine), low) for kind, mine, low in zip(kinds, places, lows, strict=True)
    ]


def _require_lengths(groups: list[Group], table: list[tuple[int, int]], room: int) -> None:
    if sum(length for _, length in table) != room:
        raise ValueError(f"has {room} bytes for planes of {sum(n for _, n in table)}")
    rest = iter(table)
    for group in groups:
        for width, (coding, length) in ((width, next(rest)) for width in group.widths):
            fixed = {AS_IS: group.count * width, SEVENS: group.count - group.count // 8}
            wrong = length != fixed.get(coding, length) or coding > SEVENS
            if wrong or (coding != AS_IS and width > 1):
                raise ValueError(f"a plane of {length} bytes for {group.count} elements")
