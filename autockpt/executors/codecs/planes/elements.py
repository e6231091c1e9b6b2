"""Elements to planes of bytes and back, a cache block at a time, with numpy (no GIL held).

Plane k holds byte k of every element.  Before, what makes bytes of one plane alike:

* floating: turned left by one bit.  The sign goes from the top to the bottom, so that the topmost
  byte of fp32 and bf16 is the exponent and nothing else: 1-3 % smaller than planes alone.
* delta: the difference to the base modulo 2^bits as unsigned zigzag (0, -1, 1, -2 ... become 0, 1,
  2, 3 ...), so that small differences of either sign have zeros above.  Exact for every bit
  pattern, NaN included, because it is integer arithmetic on the bits.

Bytes move by shifts and casts between widths, which numpy vectorises (40-60 GB/s in cache), and
not by strides (14 GB/s).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autockpt.executors.layout.runs import Kind

Bytes = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger[Any]]

BLOCK_BYTES = 2**18
"""Of elements that are taken apart at a time: with what comes of them in a second-level cache."""


def words_of(data: memoryview | Bytes, kind: Kind) -> Words:
    """The bytes as unsigned little-endian elements; no copy."""
    return np.frombuffer(data, dtype=f"<u{kind.width}")


def split(words: Words, base: Words | None, kind: Kind, planes: Sequence[Bytes]) -> None:
    """Writes byte k of every prepared word into planes[k], which are as long as the words."""
    spare = np.empty(BLOCK_BYTES // kind.width, words.dtype)
    for at, stop in _blocks(len(words), kind.width):
        block, free = words[at:stop], spare[: stop - at]
        if base is not None:
            block = _zigzag(block, base[at:stop])
        turned = int(kind.floating and base is None)
        for k, plane in enumerate(planes):
            if not k:
                _bottom_byte(block, free, plane[at:stop], turned=bool(turned))
                continue
            np.right_shift(block, 8 * k - turned, out=free)
            np.copyto(plane[at:stop], free, casting="unsafe")


def join(words: Words, base: Words | None, kind: Kind, planes: Sequence[Bytes]) -> None:
    """Fills `words` with what was split into these planes."""
    for at, stop in _blocks(len(words), kind.width):
        rows: list[Any] = [plane[at:stop] for plane in planes]
        while len(rows) > 1:
            rows = [_widen(low, high) for low, high in zip(rows[::2], rows[1::2], strict=True)]
        if base is not None:
            _unzigzag(rows[0], base[at:stop], words[at:stop])
        elif kind.floating:
            _turn_right(rows[0], words[at:stop])
        else:
            words[at:stop] = rows[0]


def _blocks(count: int, width: int) -> Iterator[tuple[int, int]]:
    step = BLOCK_BYTES // width
    for at in range(0, count, step):
        yield at, min(at + step, count)


def _bottom_byte(block: Words, free: Words, plane: Bytes, *, turned: bool) -> None:
    np.copyto(plane, block, casting="unsafe")
    if turned:
        np.left_shift(plane, 1, out=plane)
        np.right_shift(block, 8 * block.itemsize - 1, out=free)
        np.bitwise_or(plane, free.astype(np.uint8), out=plane)


def _widen(low: Words, high: Words) -> Words:
    """Words of twice the width."""
    wide: Words = high.astype(f"<u{2 * high.itemsize}")
    wide <<= 8 * high.itemsize
    wide |= low.astype(wide.dtype)
    return wide


def _turn_right(block: Words, target: Words) -> None:
    top = block << (8 * block.itemsize - 1)
    np.right_shift(block, 1, out=target)
    np.bitwise_or(target, top, out=target)


def _zigzag(block: Words, base: Words) -> Words:
    difference = block - base
    signs = difference.view(f"<i{block.itemsize}") >> (8 * block.itemsize - 1)  # 0 or -1
    difference <<= 1
    difference ^= signs.view(block.dtype)
    return difference


def _unzigzag(block: Words, base: Words, target: Words) -> None:
    negative = block & 1
    np.negative(negative, out=negative)  # all ones
    np.right_shift(block, 1, out=target)
    np.bitwise_xor(target, negative, out=target)
    np.add(target, base, out=target)
