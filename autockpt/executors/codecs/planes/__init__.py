"""Elements taken apart into planes of bytes, each coded as a sample of it says: lossless.

A frame is a header (`frame.py`), then the planes that are not coded, then one zstd frame for each
that is.  With a base, groups of kind `delta` hold differences to the bytes at the same place of it;
who keeps the frame says which base it is.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autockpt.executors.codecs import Frame
from autockpt.executors.codecs.planes import entropy
from autockpt.executors.codecs.planes.elements import Bytes, Words, join, split
from autockpt.executors.codecs.planes.frame import (
    MAX_RUNS,
    Group,
    grouped,
    header_size,
    kinds_of,
    pack_header,
    parse_header,
)
from autockpt.executors.codecs.zstd import decompress
from autockpt.executors.layout.runs import Run

SAMPLES, SAMPLE_ELEMENTS = 4, 2048
"""Of a group: this many contiguous pieces, spread evenly; 0.1 ms a chunk."""


class PlanesCodec:
    """Byte planes of elements; without runs a chunk is one plane of bytes."""

    name = "planes"

    def encode(
        self,
        raw: memoryview,
        *,
        runs: Sequence[Run] = (),
        base: memoryview | None = None,
        into: memoryview | None = None,
    ) -> memoryview:
        """The frame of a chunk; groups become differences where a sample says they are smaller."""
        table, groups = grouped(runs if 0 < len(runs) <= MAX_RUNS else [Run(len(raw))], len(raw))
        chosen = [_choose(group, raw, base) for group in groups]
        groups = [group for group, _ in chosen]
        codings = [coding for _, codes in chosen for coding in codes]
        header_bytes = header_size(groups, table)
        bound = header_bytes + len(raw) + sum(64 + group.count // 200 for group in groups) * 8
        frame = np.empty(0, np.uint8) if into is None else np.frombuffer(into, np.uint8)
        if len(frame) < bound:
            frame = np.empty(bound, np.uint8)
        lengths, end = _write_planes(frame, header_bytes, groups, codings, raw, base)
        coded = [(coding is not None, n) for coding, n in zip(codings, lengths, strict=True)]
        header = pack_header(groups, table, coded)
        frame[:header_bytes] = np.frombuffer(header, np.uint8)
        return frame[:end].data

    def decode(self, frame: Frame, raw_bytes: int, *, base: memoryview | None = None) -> memoryview:
        """The chunk.  Raises CorruptCheckpointError unless it has exactly `raw_bytes`."""
        view = memoryview(frame)
        groups, coded, at = parse_header(view, raw_bytes, 0 if base is None else len(base))
        raw = np.empty(raw_bytes, np.uint8)
        planes = _read_planes(view, groups, coded, at)
        for group in groups:
            parts = [next(planes) for _ in range(group.kind.width)]
            against = base if group.kind.delta else None
            olds = group.pieces(against) if against is not None else None
            for first, words in group.pieces(raw):
                old = next(olds)[1] if olds is not None else None
                join(words, old, group.kind, [p[first : first + len(words)] for p in parts])
        return raw.data


def needs_base(frame: Frame) -> bool:
    """Whether a frame of `encode` holds differences."""
    return any(kind.delta for kind in kinds_of(memoryview(frame)))


def _choose(
    group: Group, raw: memoryview, base: memoryview | None
) -> tuple[Group, list[dict[int, int] | None]]:
    """The group, as differences or not, and how each of its planes is coded."""
    plain = replace(group, kind=replace(group.kind, delta=False))
    samples = _sample(plain, raw, None)
    if group.kind.delta and base is not None:
        differences = _sample(group, raw, base)
        if _bits(differences) < _bits(samples):
            plain, samples = group, differences
    return plain, [entropy.encoding_of(sample) for sample in samples]


def _bits(samples: list[Bytes]) -> float:
    return sum(entropy.bits_per_byte(sample) for sample in samples)


def _sample(group: Group, raw: memoryview, base: memoryview | None) -> list[Bytes]:
    """The planes of a few pieces of a group."""
    pieces = [_spread(words, group.count) for _, words in group.pieces(raw)]
    words = np.concatenate([piece for some in pieces for piece in some])
    old: Words | None = None
    if base is not None:
        olds = [_spread(words, group.count) for _, words in group.pieces(base)]
        old = np.concatenate([piece for some in olds for piece in some])
    planes = [np.empty(len(words), np.uint8) for _ in range(group.kind.width)]
    split(words, old, group.kind, planes)
    return planes


def _spread(words: Words, of: int) -> list[Words]:
    """Of one run its part of the sample of a group of `of` elements: at least a little."""
    wanted = SAMPLES * SAMPLE_ELEMENTS
    if of <= wanted or len(words) <= 64:
        return [words]
    count = max(1, round(SAMPLES * len(words) / of))
    size = min(SAMPLE_ELEMENTS, max(64, wanted * len(words) // of))
    step = len(words) // count
    first = (step - min(step, size)) // 2
    return [words[i * step + first :][:size] for i in range(count)]


class _Spare(threading.local):
    """A thread's memory for planes that are coded: new pages cost as much as the coding."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of(self, nbytes: int) -> Bytes:
        """At least so many bytes, until the next call."""
        if len(self._memory) < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory


_spare = _Spare()


def _write_planes(
    frame: Bytes,
    at: int,
    groups: list[Group],
    codings: list[dict[int, int] | None],
    raw: memoryview,
    base: memoryview | None,
) -> tuple[list[int], int]:
    """(length of every plane as stored, end of the frame)."""
    planes: list[Bytes] = []
    rest, spare, used = iter(codings), _spare.of(len(raw)), 0
    for group in groups:
        mine: list[Bytes] = []
        for _ in range(group.kind.width):
            if next(rest) is None:  # in its place at once
                mine.append(frame[at : at + group.count])
                at += group.count
            else:
                mine.append(spare[used : used + group.count])
                used += group.count
        olds = group.pieces(base) if group.kind.delta and base is not None else None
        for first, words in group.pieces(raw):
            old = next(olds)[1] if olds is not None else None
            split(words, old, group.kind, [p[first : first + len(words)] for p in mine])
        planes += mine
    lengths = [len(plane) for plane in planes]
    for number, coding in enumerate(codings):
        if coding is not None:
            data = entropy.compress(planes[number], coding)
            lengths[number] = len(data)
            frame[at : at + len(data)] = np.frombuffer(data, np.uint8)
            at += len(data)
    return lengths, at


def _read_planes(
    frame: memoryview, groups: list[Group], coded: list[tuple[bool, int]], at: int
) -> Iterator[Bytes]:
    """Every plane in order."""
    counts = [group.count for group in groups for _ in range(group.kind.width)]
    later = at + sum(length for is_coded, length in coded if not is_coded)
    for (is_coded, length), count in zip(coded, counts, strict=True):
        if is_coded:
            data: Any = decompress(frame[later : later + length], count)
            later += length
        else:
            data = frame[at : at + length]
            at += length
        yield np.frombuffer(data, np.uint8)
