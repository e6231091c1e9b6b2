"""Entropy coding of one plane of bytes: left alone, Huffman, or zstd, by a look at a sample.

Mantissas are noise: a histogram of a few thousand bytes says so, and they are copied.  Exponents
have few values in little order.  Huffman alone is 3-4 times as fast as zstd 1 and mostly smaller,
because zstd finds few matches that pay for their offsets.  Differences to a base and small integers
are mostly zeros in runs, and rows of second moments look alike: there matches pay.  Either is a
zstd frame (RFC 8878), of nibbles where few values are beyond them: half as many bytes to code.
"""

import math
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autockpt.executors.image.codecs.planes.elements import Bytes
from autockpt.executors.image.codecs.planes.frame import CODED, NIBBLES, SEVENS
from autockpt.executors.image.codecs.planes.packing import (
    HEAD,
    Nibbles,
    pack,
    pack_sevens,
    window_of,
)
from autockpt.executors.image.codecs.zstd import zstd

SAMPLES = 4
"""Contiguous pieces that a sample is made of."""
NOISE_BITS = 7.8
"""Bits a byte above which a plane is stored as it is: Huffman would save less than 2.5 % of it."""
HISTOGRAM_BYTES = 2**13
"""Bytes of a sample, spread evenly, for the histogram; the search for matches covers all of the
sample."""
WORTH, WORTH_OF_NIBBLES = 0.005, 0.0025
"""The fraction of a sample that matches must save beyond Huffman before the coder searches for
matches.  The search takes 3 times as long among bytes and up to twice as long among nibbles.  A
plane has several times more of them to offer than its sample, whose pieces are shorter than a
window."""
ESCAPES, MATCHED_ESCAPES = 0.02, 0.1
"""Of a sample, at most, beyond the 15 values that nibbles hold.  Taking one out costs as much as
Huffman saves on 50.  Matches take so much longer among bytes that for them more are taken out."""
ROWS_BITS = (1.0, 5.5)
"""Planes with an entropy in this range, in bits a byte, are treated as exponents.  Exponents are
distributed differently in every row of a matrix, and short blocks follow the rows."""
_BLOCK_LOG, _WINDOW_LOG = 15, 17
"""log2 of the bytes of a short block and of the window.  Each short block has a code of its own.
The window limits how far matches look back, and is the length of all other blocks.  The library
copies its input through a buffer of that size: a small one stays in cache."""
_LITERAL_COMPRESSION, _MAX_BLOCK_SIZE = 1002, 1015
"""ZSTD_c_literalCompressionMode and ZSTD_c_maxBlockSize.  The mode is 1 because zstd leaves
literals raw at the skip-ahead speed below.  Not in the stable interface: done without if
refused."""
_P = zstd.CompressionParameter
PLAIN: dict[int, int] = {
    _P.compression_level: 1, _P.strategy: zstd.Strategy.fast, _P.hash_log: 6, _P.min_match: 7,
}  # fmt: skip
_HUFFMAN: dict[int, int] = {**PLAIN, _P.target_length: 2**17, _LITERAL_COMPRESSION: 1}


def bits_per_byte(sample: Bytes) -> float:
    """Order-0 entropy of a sample, in bits a byte; 0 for no bytes."""
    return _entropy(_histogram(sample))


def _histogram(sample: Bytes) -> NDArray[np.int64]:
    step = max(1, len(sample) // HISTOGRAM_BYTES)
    return np.bincount(sample[::step], minlength=256)


def _entropy(counts: NDArray[np.int64]) -> float:
    total, counts = int(counts.sum()), counts[counts > 0]
    return math.log2(total) - float(counts @ np.log2(counts)) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Coding:
    """How a plane is coded."""

    options: dict[int, int]
    lowest: int | None = None
    """The lowest of the 15 values that nibbles hold; None: bytes as they are."""
    sevens: bool = False
    """Noise whose lowest bit is 0; `options` where one turns up that is not."""


def coding_of(sample: Bytes) -> Coding | None:
    """How the plane of this sample is coded; None: not at all."""
    counts = _histogram(sample)
    bits = _entropy(counts)
    if bits > NOISE_BITS:
        return None
    if bits > NOISE_BITS * 7 / 8 and not (sample & 1).any():
        return Coding(huffman_only(short_blocks=False), sevens=True)
    return _least(_forms(sample, counts), short_blocks=ROWS_BITS[0] < bits < ROWS_BITS[1])


_Form = tuple[Bytes, int | None, float]
"""(what is coded, lowest of nibbles, bytes that matches must save in it)."""


def _forms(sample: Bytes, counts: NDArray[np.int64]) -> list[_Form]:
    """The one for Huffman, then what else matches are looked for in."""
    lowest, held = window_of(counts)
    few, some = (held >= (1.0 - part) * int(counts.sum()) for part in (ESCAPES, MATCHED_ESCAPES))
    whole: _Form = (sample, None, WORTH * len(sample))
    packed = pack(sample, lowest) if some else None
    if packed is None:
        return [whole]
    nibbles: _Form = (packed[0], lowest, WORTH_OF_NIBBLES * len(sample))
    return [nibbles] if few else [whole, nibbles]


def _least(forms: list[_Form], *, short_blocks: bool) -> Coding:
    """Huffman, or matches in the form where they save most beyond what they must."""
    plain, lowest, _ = forms[0]
    matched = matches(short_blocks=short_blocks)
    # Huffman needs a bit for every byte, whatever a sample of nothing but zeros says.
    if bits_per_byte(plain) < 1.0:
        return Coding(matched, lowest)
    best = Coding(huffman_only(short_blocks=short_blocks), lowest)
    least: float = _trial(plain, best.options)
    for form, lowest, worth in forms:
        size = _trial(form, matched) + worth
        if size < least:
            least, best = size, Coding(matched, lowest)
    return best


def _trial(sample: Bytes, options: dict[int, int]) -> int:
    """Bytes of its pieces, each alone: what follows one in the sample does not in the plane."""
    return sum(len(compress(piece, options)) for piece in np.array_split(sample, SAMPLES))


def encoded(plane: Bytes | Nibbles, count: int, coding: Coding) -> tuple[int, list[bytes | Bytes]]:
    """Return (the header's code, the stored parts) of a plane of `count` bytes."""
    if isinstance(plane, Nibbles):
        packed = plane.end()
        if packed is not None:
            head = HEAD.pack(coding.lowest, packed[1])
            return NIBBLES, [head, compress(packed[0], coding.options)]
        plane = plane.plane(count)  # the sample did not show what the plane is
    sevens = pack_sevens(plane) if coding.sevens else None
    return (CODED, [compress(plane, coding.options)]) if sevens is None else (SEVENS, [sevens])


def huffman_only(*, short_blocks: bool) -> dict[int, int]:
    """Parameters under which this zstd codes literals and looks for next to no matches."""
    options = _HUFFMAN if _is_known(_LITERAL_COMPRESSION, 1) else PLAIN
    return {**options, _P.window_log: _BLOCK_LOG if short_blocks else _WINDOW_LOG}


def matches(*, short_blocks: bool) -> dict[int, int]:
    """Parameters under which this zstd looks for matches."""
    options: dict[int, int] = {_P.compression_level: 1, _P.window_log: _WINDOW_LOG}
    short = short_blocks and _is_known(_MAX_BLOCK_SIZE, 2**_BLOCK_LOG)
    return {**options, _MAX_BLOCK_SIZE: 2**_BLOCK_LOG} if short else options


@cache
def _is_known(option: int, value: int) -> bool:
    """Whether this zstd takes it."""
    try:
        zstd.compress(bytes(64), options={option: value})
    except (ValueError, zstd.ZstdError):
        return False
    return True


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
