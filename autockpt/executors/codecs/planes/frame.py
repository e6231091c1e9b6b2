"""The header of a frame of planes: what the chunk is made of and how long every plane is.

    "PL" 1 0  groups: u16  runs: u16              8 bytes, little-endian
    per group: kind: u8                           see `Kind.code`
    per run:   length: u32  group: u16            in the order of the chunk, as long as it together
    per plane: coded: u8  length: u32             groups in order, from the lowest byte up

A group holds the elements of its runs one after another.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autockpt.executors.codecs.planes.elements import Bytes, Words, words_of
from autockpt.executors.layout.runs import Kind, Run, kind_of
from autockpt.values.errors import ConfigError, CorruptCheckpointError

_HEAD, _RUN, _PLANE = struct.Struct("<4sHH"), struct.Struct("<IH"), struct.Struct("<BI")
_MAGIC = b"PL\x01\x00"
MAX_RUNS = 2**16 - 1


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that are encoded together."""

    kind: Kind
    places: tuple[tuple[int, int], ...]
    """[start, stop) in the chunk."""

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
    planes = sum(group.kind.width for group in groups)
    return _HEAD.size + len(groups) + _RUN.size * len(table) + _PLANE.size * planes


def pack_header(
    groups: Sequence[Group], table: Sequence[tuple[Run, int]], coded: Sequence[tuple[bool, int]]
) -> bytes:
    """`coded`: of every plane whether it is coded, and its length."""
    return b"".join([
        _HEAD.pack(_MAGIC, len(groups), len(table)),
        bytes(group.kind.code for group in groups),
        *(_RUN.pack(run.nbytes, number) for run, number in table),
        *(_PLANE.pack(*row) for row in coded),
    ])  # fmt: skip


def parse_header(
    frame: memoryview, raw_bytes: int, base_bytes: int
) -> tuple[list[Group], list[tuple[bool, int]], int]:
    """(groups, (coded, length) of every plane, where planes begin), all checked.

    Raises CorruptCheckpointError.
    """
    try:
        kinds = kinds_of(frame)
        runs = _HEAD.unpack_from(frame)[2]
        at = _HEAD.size + len(kinds)
        rows = list(_RUN.iter_unpack(_exactly(frame, at, _RUN.size * runs)))
        at += _RUN.size * runs
        count = sum(kind.width for kind in kinds)
        table = list(_PLANE.iter_unpack(_exactly(frame, at, _PLANE.size * count)))
        at += _PLANE.size * count
        made = _groups(kinds, rows, raw_bytes, base_bytes)
        _require_lengths(made, table, len(frame) - at)
    except (ValueError, ConfigError, struct.error) as error:
        raise CorruptCheckpointError(f"planes frame: {error}") from None
    return made, [(bool(coded), length) for coded, length in table], at


def kinds_of(frame: memoryview) -> list[Kind]:
    """Of every group.  Raises ValueError, ConfigError or struct.error for what is no header."""
    magic, groups, _ = _HEAD.unpack_from(frame)
    if magic != _MAGIC:
        raise ValueError(f"begins with {magic!r}")
    return [kind_of(code) for code in _exactly(frame, _HEAD.size, groups)]


def _exactly(frame: memoryview, at: int, nbytes: int) -> memoryview:
    if at + nbytes > len(frame):
        raise ValueError(f"ends at {len(frame)} bytes, its header needs {at + nbytes}")
    return frame[at : at + nbytes]


def _groups(
    kinds: list[Kind], rows: list[tuple[int, int]], raw_bytes: int, base_bytes: int
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
    return [Group(kind, tuple(mine)) for kind, mine in zip(kinds, places, strict=True)]


def _require_lengths(groups: list[Group], table: list[tuple[int, int]], room: int) -> None:
    if sum(length for _, length in table) != room:
        raise ValueError(f"has {room} bytes for planes of {sum(n for _, n in table)}")
    rest = iter(table)
    for group in groups:
        for coded, length in (next(rest) for _ in range(group.kind.width)):
            if coded > 1 or (not coded and length != group.count):
                raise ValueError(f"a plane of {length} bytes for {group.count} elements")
