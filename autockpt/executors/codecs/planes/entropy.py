"""Entropy coding of one plane of bytes: left alone, Huffman, or zstd, by a look at a sample.

Mantissas are noise: a histogram of a few thousand bytes says so, and they are copied.  Exponents
have few values in no order: Huffman alone is 3-4 times as fast as zstd 1 and smaller, because no
match that zstd finds in them pays for its offset.  Differences to a base and small integers are
mostly zeros in runs: there matches pay.  Either is a zstd frame (RFC 8878), of nibbles where few
values are beyond them: half as many bytes to code.
"""

import math
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autockpt.executors.codecs.planes.elements import Bytes
from autockpt.executors.codecs.planes.frame import CODED, NIBBLES, SEVENS
from autockpt.executors.codecs.planes.packing import (
    HEAD,
    Nibbles,
    pack,
    pack_sevens,
    window_of,
)
from autockpt.executors.codecs.zstd import zstd

NOISE_BITS = 7.8
"""Bits a byte above which a plane is stored as it is: Huffman would save less than 2.5 % of it."""
WORTH = 0.03
"""What zstd must save beyond Huffman, as a part of the plane, to be used: it takes 3-4 times as
long (docs/compression.md)."""
ESCAPES, ESCAPES_OF_MATCHES = 0.02, 0.15
"""Of a sample, at most, beyond the 15 values that nibbles hold: taking one out costs as much as
Huffman saves on 50, and as matches save on 7."""

_LITERAL_COMPRESSION = 1002
"""ZSTD_c_literalCompressionMode.  zstd leaves literals raw when it is told to skip ahead as fast as
below; 1 makes it code them.  Not in the stable interface: what refuses it gets `PLAIN`."""
_P = zstd.CompressionParameter
_SMALL: dict[int, int] = {_P.compression_level: 1, _P.window_log: 17}
"""The library copies its input through a buffer of a window's size: a small one stays in cache."""
PLAIN: dict[int, int] = {
    **_SMALL, _P.strategy: zstd.Strategy.fast, _P.hash_log: 6, _P.min_match: 7,
}  # fmt: skip
_HUFFMAN: dict[int, int] = {**PLAIN, _P.target_length: 2**17, _LITERAL_COMPRESSION: 1}
_MATCHES: dict[int, int] = dict(_SMALL)


def bits_per_byte(sample: Bytes) -> float:
    """Order-0 entropy of a sample, in bits a byte; 0 for no bytes."""
    return _entropy(np.bincount(sample, minlength=256))


def _entropy(counts: NDArray[np.int64]) -> float:
    total, counts = int(counts.sum()), counts[counts > 0]
    return math.log2(total) - float(counts @ np.log2(counts)) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Coding:
    """How a plane is coded."""

    options: dict[int, int]
    lowest: int | None = None
    """Of the 15 values that nibbles hold; None: bytes as they are."""
    sevens: bool = False
    """Noise whose lowest bit is 0; `options` where one turns up that is not."""


def coding_of(sample: Bytes) -> Coding | None:
    """How the plane of this sample is coded; None: not at all."""
    counts = np.bincount(sample, minlength=256)
    bits = _entropy(counts)
    if bits > NOISE_BITS:
        return None
    if bits > NOISE_BITS * 7 / 8 and not (sample & 1).any():
        return Coding(huffman_only(), sevens=True)
    lowest, held = window_of(counts)
    escapes = 1.0 - held / len(sample)
    packed = pack(sample, lowest) if escapes <= ESCAPES_OF_MATCHES else None
    if packed is not None:
        options = _options_of(packed[0], bits_per_byte(packed[0]))
        if escapes <= ESCAPES or options is _MATCHES:
            return Coding(options, lowest)
    return Coding(_options_of(sample, bits))


def _options_of(sample: Bytes, bits: float) -> dict[int, int]:
    if bits < 1.0:  # Huffman needs a bit for every byte
        return _MATCHES
    huffman = len(compress(sample, huffman_only()))
    matched = len(compress(sample, _MATCHES))
    return _MATCHES if huffman - matched > WORTH * len(sample) else huffman_only()


def encoded(plane: Bytes | Nibbles, count: int, coding: Coding) -> tuple[int, list[bytes | Bytes]]:
    """(the header's word for it, what is stored of a plane of `count`)."""
    if isinstance(plane, Nibbles):
        packed = plane.end()
        if packed is not None:
            head = HEAD.pack(coding.lowest, packed[1])
            return NIBBLES, [head, compress(packed[0], coding.options)]
        plane = plane.plane(count)  # the sample did not show what the plane is
    sevens = pack_sevens(plane) if coding.sevens else None
    return (CODED, [compress(plane, coding.options)]) if sevens is None else (SEVENS, [sevens])


@cache
def huffman_only() -> dict[int, int]:
    """Parameters under which this zstd codes literals and looks for next to no matches."""
    try:
        zstd.compress(bytes(64), options=_HUFFMAN)
    except (ValueError, zstd.ZstdError):
        return PLAIN
    return _HUFFMAN


def compress(plane: Bytes, options: dict[int, int]) -> bytes:
    """The zstd frame of a plane; the library releases the GIL."""
    key = tuple(options.items())
    if key not in _made.compressors:
        _made.compressors[key] = zstd.ZstdCompressor(options=options)
    compressor = _made.compressors[key]
    frame: bytes = compressor.compress(plane.data, compressor.FLUSH_FRAME)
    return frame


class _Made(threading.local):
    """A thread's compressors: making one costs as much as coding 100 KB."""

    def __init__(self) -> None:
        self.compressors: dict[tuple[tuple[int, int], ...], Any] = {}


_made = _Made()
