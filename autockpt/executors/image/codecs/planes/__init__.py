"""Elements taken apart into planes of bytes, each coded as a sample of it says: lossless.

A frame is a header (`frame.py`), then the parts that are as they are, then the coded planes.  With
a base, groups of kind `delta` hold differences to the bytes at the same place of the base.  The
owner of the frame records which base that is.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autockpt.executors.image.codecs.interface import Frame
from autockpt.executors.image.codecs.planes import entropy
from autockpt.executors.image.codecs.planes.elements import (
    Bytes,
    Part,
    Words,
    blocks,
    join,
    scratch,
    split,
)
from autockpt.executors.image.codecs.planes.frame import (
    AS_IS,
    MAX_RUNS,
    NIBBLES,
    SEVENS,
    Group,
    Header,
    grouped,
    header_size,
    kinds_of,
    pack_header,
    parse_header,
)
from autockpt.executors.image.codecs.planes.packing import Nibbles, unpack, unpack_sevens
from autockpt.executors.image.codecs.zstd import pieces
from autockpt.executors.image.layout.runs import Kind, Run

SAMPLE_ELEMENTS = (2**11, 2**13)
"""Elements of one piece of a sample, at least and at most: a matrix of some thousand columns looks
alike one row on.  Between these limits a sample is a sixteenth of its group."""
PIECE_BYTES = 2**16
"""Bytes of a coded plane that are decoded at a time: they stay in cache until they are joined."""


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
        parts, end = _write_parts(frame, header_bytes, groups, codings, raw, base)
        header = pack_header(groups, table, parts)
        frame[:header_bytes] = np.frombuffer(header, np.uint8)
        return frame[:end].data

    def decode(self, frame: Frame, raw_bytes: int, *, base: memoryview | None = None) -> memoryview:
        """The chunk.  Raises CorruptCheckpointError unless it has exactly `raw_bytes`."""
        view = memoryview(frame)
        header = parse_header(view, raw_bytes, 0 if base is None else len(base))
        raw = np.empty(raw_bytes, np.uint8)
        parts = _read_parts(view, header)
        for group in header.groups:
            mine = [next(parts) for _ in group.widths]
            against = base if group.kind.delta else None
            olds = group.pieces(against) if against is not None else None
            for _, words in group.pieces(raw):
                old = next(olds)[1] if olds is not None else None
                for at, stop in blocks(len(words), group.kind.width):
                    before = None if old is None else old[at:stop]
                    taken = [part.take(stop - at) for part in mine]
                    join(words[at:stop], before, group.kind, taken, whole=header.whole)
        return raw.data


def needs_base(frame: Frame) -> bool:
    """Whether a frame of `encode` holds differences."""
    return any(kind.delta for kind in kinds_of(memoryview(frame)))


def _choose(
    group: Group, raw: memoryview, base: memoryview | None
) -> tuple[Group, list[entropy.Coding | None]]:
    """The group, as differences or not, and how each of its parts is coded."""
    plain = replace(group, kind=replace(group.kind, delta=False))
    samples = _sample(plain, raw, None)
    if group.kind.delta and base is not None:
        differences = _sample(group, raw, base)
        if _bits(differences) < _bits(samples):
            plain, samples = group, differences
    codings = [entropy.coding_of(sample) for sample in samples]
    width = plain.kind.width
    low = next((n for n in (width, width // 2) if n > 1 and not any(codings[:n])), 0)
    if low == width:  # nothing to gain: as it is
        plain = replace(plain, kind=Kind(width))
    return replace(plain, low=low), [None] * bool(low) + codings[low:]


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
    least, most = SAMPLE_ELEMENTS
    piece = max(least, min(most, of // (16 * entropy.SAMPLES)))
    wanted = entropy.SAMPLES * piece
    if of <= wanted or len(words) <= 64:
        return [words]
    count = max(1, round(entropy.SAMPLES * len(words) / of))
    size = min(piece, max(64, wanted * len(words) // of))
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


def _write_parts(
    frame: Bytes,
    at: int,
    groups: list[Group],
    codings: list[entropy.Coding | None],
    raw: memoryview,
    base: memoryview | None,
) -> tuple[list[tuple[int, int]], int]:
    """((coding, length) of every part as stored, end of the frame)."""
    shapes = [(width, group.count) for group in groups for width in group.widths]
    spare = _spare.of(sum(n + n % 2 for (_, n), c in zip(shapes, codings, strict=True) if c))
    sinks: list[Part | Nibbles] = []
    used = 0
    for (width, count), coding in zip(shapes, codings, strict=True):
        if coding is None:  # in its place at once
            sinks.append(frame[at : at + count * width].view(f"<u{width}"))
            at += count * width
            continue
        mine = spare[used : used + count + count % 2]
        used += len(mine)
        sinks.append(mine[:count] if coding.lowest is None else Nibbles(coding.lowest, mine))
    rest = iter(sinks)
    for group in groups:
        _fill([next(rest) for _ in group.widths], group, raw, base if group.kind.delta else None)
    table: list[tuple[int, int]] = []
    for sink, (width, count), coding in zip(sinks, shapes, codings, strict=True):
        if coding is None:
            table.append((AS_IS, count * width))
            continue
        began = at
        stored, datas = entropy.encoded(sink, count, coding)
        for data in datas:
            frame[at : at + len(data)] = np.frombuffer(data, np.uint8)
            at += len(data)
        table.append((stored, at - began))
    return table, at


def _fill(
    sinks: list[Part | Nibbles], group: Group, raw: memoryview, base: memoryview | None
) -> None:
    """Takes a group apart; what becomes nibbles is packed while it is in cache."""
    olds = group.pieces(base) if base is not None else None
    for first, words in group.pieces(raw):
        old = next(olds)[1] if olds is not None else None
        for at, stop in blocks(len(words), group.kind.width):
            targets = [
                scratch.of(f"plane {k}", 1, stop - at)
                if isinstance(sink, Nibbles)
                else sink[first + at : first + stop]
                for k, sink in enumerate(sinks)
            ]
            split(words[at:stop], None if old is None else old[at:stop], group.kind, targets)
            for sink, target in zip(sinks, targets, strict=True):
                if isinstance(sink, Nibbles):
                    sink.add(target)


class _Stream:
    """A part in order, made a block at a time."""

    def __init__(self, made: Iterator[Part], nothing: Part) -> None:
        self._made, self._there = made, nothing

    def take(self, count: int) -> Part:
        """The next `count` of it."""
        if len(self._there) < count:
            found, there = [self._there], len(self._there)
            while there < count:
                found.append(next(self._made))
                there += len(found[-1])
            found = [some for some in found if len(some)]
            self._there = found[0] if len(found) == 1 else np.concatenate(found)
        taken, self._there = self._there[:count], self._there[count:]
        return taken


def _read_parts(frame: memoryview, header: Header) -> Iterator[_Stream]:
    """Every part in order."""
    shapes = [(width, group.count) for group in header.groups for width in group.widths]
    at = header.at
    later = at + sum(length for coding, length in header.parts if coding == AS_IS)
    for (coding, length), (width, count) in zip(header.parts, shapes, strict=True):
        if coding == AS_IS:
            data, at = frame[at : at + length], at + length
            yield _Stream(iter(()), np.frombuffer(data, f"<u{width}"))
            continue
        data, later = frame[later : later + length], later + length
        if coding == SEVENS:
            yield _Stream(iter(()), unpack_sevens(np.frombuffer(data, np.uint8), count))
            continue
        made = (
            unpack(data, count, PIECE_BYTES)
            if coding == NIBBLES
            else (np.frombuffer(some, np.uint8) for some in pieces(data, count, PIECE_BYTES))
        )
        yield _Stream(made, np.empty(0, np.uint8))
