"""Entropy coding of one plane of bytes: left alone, Huffman, or zstd, by a look at a sample.

Mantissas are noise: a histogram of a few thousand bytes says so, and they are copied.  Exponents
have few values in no order: Huffman alone is 3-4 times as fast as zstd 1 and smaller, because no
match that zstd finds in them pays for its offset.  Differences to a base and small integers are
mostly zeros in runs: there matches pay.  All three are zstd frames (RFC 8878), or bytes.
"""

import math
import threading
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autockpt.executors.codecs.zstd import zstd

Bytes = NDArray[np.uint8]

NOISE_BITS = 7.8
"""Bits a byte above which a plane is stored as it is: Huffman would save less than 2.5 % of it."""
WORTH = 0.03
"""What zstd must save beyond Huffman, as a part of the plane, to be used: it takes 3-4 times as
long (docs/compression.md)."""
PIECES, PIECE_BYTES = 4, 4096
"""The sample: this many contiguous pieces, spread evenly."""

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


def sampled(plane: Any) -> Bytes:
    """PIECES contiguous pieces of a plane (or of a strided view of one), or all of a short one."""
    if len(plane) <= PIECES * PIECE_BYTES:
        return np.ascontiguousarray(plane)
    step = (len(plane) - PIECE_BYTES) // (PIECES - 1)
    return np.concatenate([plane[i * step : i * step + PIECE_BYTES] for i in range(PIECES)])


def bits_per_byte(sample: Bytes) -> float:
    """Order-0 entropy of a sample, in bits a byte; 0 for no bytes."""
    counts = np.bincount(sample, minlength=256)
    counts = counts[counts > 0]
    if not len(sample):
        return 0.0
    return math.log2(len(sample)) - float(counts @ np.log2(counts)) / len(sample)


def encoding_of(sample: Bytes) -> dict[int, int] | None:
    """How the plane of this sample is compressed; None: not at all."""
    bits = bits_per_byte(sample)
    if bits > NOISE_BITS:
        return None
    if bits < 1.0:  # Huffman needs a bit for every byte
        return _MATCHES
    huffman = len(compress(sample, huffman_only()))
    matched = len(compress(sample, _MATCHES))
    return _MATCHES if huffman - matched > WORTH * len(sample) else huffman_only()


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
