"""Elements to planes of bytes and back, a cache block at a time, with numpy (no GIL held).

Plane k holds byte k of every element; the low half of elements, where it is noise, stays together
as numbers of half the width.  Before, what makes bytes of one plane alike:

* floating: the upper 16 bits turned left by one.  The sign goes from the top to the bottom of them,
  so that the topmost byte of fp32 and bf16 is only the exponent.  This is 1-3 % smaller than planes
  alone.  (Frames of the first version turned whole elements.)
* delta: the difference to the base modulo 2^bits as unsigned zigzag (0, -1, 1, -2 ... become 0, 1,
  2, 3 ...), so that small differences of either sign have zeros above.  Exact for every bit
  pattern, NaN included, because it is integer arithmetic on the bits.

Bytes move by shifts and casts between widths, which numpy vectorises (40-60 GB/s in cache); strides
reach 14 GB/s.  Elements are halved first, so that most passes cover half of the bytes or fewer.
Single bytes are not shifted, because numpy does that one at a time (2 GB/s): they are added to
themselves.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autockpt.executors.image.layout.runs import Kind

Bytes = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger[Any]]
Part = NDArray[np.unsignedinteger[Any]]
"""One byte of every element, or its low half, or all of it."""

BLOCK_BYTES = 2**18
"""Bytes of elements that are taken apart at a time: they and their planes fit a second-level
cache."""


class _Scratch(threading.local):
    """A thread's memory of a block for every width: new pages cost as much as a pass."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Words] = {}

    def of(self, name: str, width: int, count: int) -> Words:
        """`count` words, until the next call for this name and width."""
        key = (name, width)
        if key not in self._made:
            self._made[key] = np.empty(BLOCK_BYTES, np.uint8).view(f"<u{width}")
        return self._made[key][:count]


scratch = _Scratch()


def words_of(data: memoryview | Bytes, kind: Kind) -> Words:
    """The bytes as unsigned little-endian elements; no copy."""
    return np.frombuffer(data, dtype=f"<u{kind.width}")


def split(words: Words, base: Words | None, kind: Kind, parts: Sequence[Part]) -> None:
    """Writes prepared words into `parts`, from the lowest up; each is as long as the words."""
    for at, stop in blocks(len(words), kind.width):
        block = words[at:stop]
        if base is not None:
            block = _zigzag(block, base[at:stop])
        _apart(block, [part[at:stop] for part in parts], turned=kind.floating and base is None)


def join(
    words: Words, base: Words | None, kind: Kind, parts: Sequence[Part], *, whole: bool
) -> None:
    """Fill `words`, at most a block, from its parts.

    `whole`: floating elements were turned as a whole, as in frames of the first version.
    """
    turned = kind.floating and base is None
    if base is not None:
        _unzigzag(_together(parts, kind.width, turned=False), base, words)
    elif turned and whole:
        _turn_right(_together(parts, kind.width, turned=False), words)
    else:
        _together(parts, kind.width, turned=turned, into=words)


def blocks(count: int, width: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of the elements of every block."""
    step = BLOCK_BYTES // width
    for at in range(0, count, step):
        yield at, min(at + step, count)


def _apart(words: Words, parts: Sequence[Part], *, turned: bool) -> None:
    width, count = words.itemsize, len(words)
    if len(parts) == 1:
        np.copyto(parts[0], words, casting="unsafe")
        return
    if width == 2 and turned:
        signs, shifted = scratch.of("signs", 1, count), scratch.of("wide", 2, count)
        np.copyto(parts[0], words, casting="unsafe")
        np.add(parts[0], parts[0], out=parts[0])
        np.greater_equal(words, 0x8000, out=signs.view(bool))
        np.bitwise_or(parts[0], signs, out=parts[0])
        np.right_shift(words, 7, out=shifted)
        np.copyto(parts[1], shifted, casting="unsafe")
        return
    low, high = _halves(parts, width)
    if len(low) == 1:
        np.copyto(low[0], words, casting="unsafe")
    else:
        half = scratch.of("half", width // 2, count)
        np.copyto(half, words, casting="unsafe")
        _apart(half, low, turned=False)
    shifted = scratch.of("wide", width, count)
    np.right_shift(words, 4 * width, out=shifted)
    if len(high) == 1:
        np.copyto(high[0], shifted, casting="unsafe")
    else:
        half = scratch.of("half", width // 2, count)
        np.copyto(half, shifted, casting="unsafe")
        _apart(half, high, turned=turned)


def _together(
    parts: Sequence[Part], width: int, *, turned: bool, into: Words | None = None
) -> Words:
    """The words of these parts, in `into` or in memory that holds until the next call."""
    count = len(parts[0])
    if len(parts) == 1:
        if into is not None:
            np.copyto(into, parts[0])
        return parts[0] if into is None else into
    low, high = _halves(parts, width)
    lower = _together(low, width // 2, turned=False)
    if len(low) > 1:  # the upper half will use the same memory
        lower = _kept(lower)
    upper = _together(high, width // 2, turned=turned)
    words = scratch.of("joined", width, count) if into is None else into
    wide = scratch.of("wide", width, count)
    np.copyto(wide, upper)
    np.left_shift(wide, 4 * width, out=wide)
    np.bitwise_or(wide, lower, out=words)
    if width == 2 and turned:
        _turn_right(words, words)
    return words


def _kept(words: Words) -> Words:
    copy = scratch.of("lower", words.itemsize, len(words))
    np.copyto(copy, words)
    return copy


def _halves(parts: Sequence[Part], width: int) -> tuple[Sequence[Part], Sequence[Part]]:
    """Parts of the lower and of the upper half of elements of this width."""
    at = 0
    for number, part in enumerate(parts):
        at += part.itemsize
        if at == width // 2:
            return parts[: number + 1], parts[number + 1 :]
    raise ValueError(f"parts of elements of {width} bytes that have no middle")


def _turn_right(block: Words, target: Words) -> None:
    top = scratch.of("top", block.itemsize, len(block))
    np.left_shift(block, 8 * block.itemsize - 1, out=top)
    np.right_shift(block, 1, out=target)
    np.bitwise_or(target, top, out=target)


def _zigzag(block: Words, base: Words) -> Words:
    difference = scratch.of("difference", block.itemsize, len(block))
    signs = scratch.of("signs", block.itemsize, len(block))
    np.subtract(block, base, out=difference)
    signed = f"<i{block.itemsize}"
    np.right_shift(difference.view(signed), 8 * block.itemsize - 1, out=signs.view(signed))
    np.add(difference, difference, out=difference)
    return np.bitwise_xor(difference, signs, out=difference)  # the signs are 0 or all ones


def _unzigzag(block: Words, base: Words, target: Words) -> None:
    negative = scratch.of("signs", block.itemsize, len(block))
    np.bitwise_and(block, 1, out=negative)
    np.negative(negative, out=negative)  # all ones
    np.right_shift(block, 1, out=target)
    np.bitwise_xor(target, negative, out=target)
    np.add(target, base, out=target)
