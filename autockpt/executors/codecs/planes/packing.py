"""Planes that need fewer than eight bits a byte whatever their order: nibbles and sevens.

Nibbles put two bytes in one, so that Huffman has half as many to code.

    lowest: u8  escapes: u32  one zstd frame of: escapes, then ceil(count / 2) bytes

A byte b is the nibble b - lowest, or 15 where that is 15 or more; then its value stands among the
escapes, in order.  The first of two is the low nibble.  Exponents of weights and moments are of 15
neighbouring values but for one in thousands.  A code of pairs is also a little shorter: it sees
that neighbours are alike, and it loses half as much to whole bits.

Sevens are noise whose lowest bit is always 0: where the sign of numbers stands that have none.

    seven pieces of n = count // 8 bytes, then the last count % 8 bytes

The lowest bits of the first seven pieces are the seven bits of the eighth, which is not stored.
"""

import struct
from collections.abc import Iterator

import numpy as np

from autockpt.executors.codecs.planes.elements import Bytes
from autockpt.executors.codecs.zstd import pieces
from autockpt.values.errors import CorruptCheckpointError

HEAD = struct.Struct("<BI")
VALUES = 15
BLOCK = 2**16
"""Bytes that are packed at a time: with what comes of them in a first- or second-level cache."""


def packed_bytes(count: int) -> int:
    """Of the memory that `pack` wants."""
    return count + (count + 1) // 2


def pack(plane: Bytes, lowest: int, into: Bytes) -> tuple[Bytes, int]:
    """(escapes and nibbles, in `into` of `packed_bytes`; how many are escapes)."""
    count = len(plane)
    nibbles, escapes = into[count : packed_bytes(count)], []
    values = np.zeros(min(BLOCK, count + count % 2), np.uint8)
    high, merged = np.empty_like(values), np.empty(len(values) // 2, "<u2")
    for at in range(0, count, BLOCK):
        block = plane[at : at + BLOCK]
        some, pairs = values[: len(block)], (len(block) + 1) // 2
        np.subtract(block, np.uint8(lowest), out=some)
        values[len(block) :] = 0
        # numpy's minimum of bytes takes ten times as long as this.
        np.greater_equal(values, VALUES, out=high.view(bool))
        found = np.flatnonzero(high.view(bool))
        if len(found):
            escapes.append(block[found])
            np.negative(high, out=high)
            np.bitwise_or(values, high, out=values)
        two, both = values[: 2 * pairs].view("<u2"), merged[:pairs]
        np.bitwise_and(two, 0x0F0F, out=two)
        np.right_shift(two, 4, out=both)
        np.bitwise_or(both, two, out=both)
        np.copyto(nibbles[at // 2 : at // 2 + pairs], both, casting="unsafe")
    lost = sum(map(len, escapes))
    if lost:
        np.concatenate(escapes, out=into[count - lost : count])
    return into[count - lost : packed_bytes(count)], lost


def unpack(data: memoryview, count: int, piece_bytes: int) -> Iterator[Bytes]:
    """The plane, in order, at most `piece_bytes` at a time.  Raises CorruptCheckpointError."""
    if len(data) < HEAD.size:
        raise CorruptCheckpointError(f"planes frame: {len(data)} bytes of nibbles")
    lowest, lost = HEAD.unpack_from(data)
    if lost > count:
        raise CorruptCheckpointError(f"planes frame: {lost} escapes for {count} elements")
    escapes, used = b"", 0
    for piece in pieces(data[HEAD.size :], lost + (count + 1) // 2, piece_bytes // 2):
        if len(escapes) < lost:
            take = min(lost - len(escapes), len(piece))
            escapes, piece = escapes + piece[:take], piece[take:]
        values = _unpacked(np.frombuffer(piece, np.uint8))[:count]
        count -= len(values)
        found = np.flatnonzero(values == VALUES)
        mine = escapes[used : used + len(found)]
        used += len(found)
        if len(mine) < len(found) or (not count and used != lost):
            raise CorruptCheckpointError(f"planes frame: {lost} escapes for other nibbles")
        np.add(values, np.uint8(lowest), out=values)
        if len(found):
            values[found] = np.frombuffer(mine, np.uint8)
        yield values


def _unpacked(nibbles: Bytes) -> Bytes:
    two = nibbles.astype("<u2")
    two |= two << 4
    two &= 0x0F0F
    return two.view(np.uint8)


def window_of(counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[int, int]:
    """(lowest value of the 15 neighbours that hold most, how many they hold) of a histogram."""
    ends = np.cumsum(np.concatenate([[0], counts, counts[: VALUES - 1]]))
    held = ends[VALUES:] - ends[:-VALUES]
    lowest = int(np.argmax(held))
    return lowest, int(held[lowest])


def sevens_bytes(count: int) -> int:
    """Of a plane of `count` as sevens."""
    return count - count // 8


def pack_sevens(plane: Bytes, into: Bytes) -> Bytes | None:
    """The plane as sevens, in `into` of its length; None where a lowest bit is set."""
    count = len(plane) // 8
    whole, rest = plane[: 8 * count], plane[8 * count :]
    if int(np.bitwise_or.reduce(whole.view(np.uint64))) & 0x0101010101010101 or (rest & 1).any():
        return None
    bits = np.empty(count, np.uint8)
    for k in range(7):
        piece = into[k * count : (k + 1) * count]
        np.right_shift(whole[7 * count :], k + 1, out=bits)
        np.bitwise_and(bits, 1, out=bits)
        np.bitwise_or(whole[k * count : (k + 1) * count], bits, out=piece)
    into[7 * count : 7 * count + len(rest)] = rest
    return into[: 7 * count + len(rest)]


def unpack_sevens(data: Bytes, count: int) -> Bytes:
    """The plane of `sevens_bytes`."""
    plane, each = np.empty(count, np.uint8), count // 8
    last, bits = plane[7 * each : 8 * each], np.empty(each, np.uint8)
    last[:] = 0
    np.bitwise_and(data[: 7 * each], 0xFE, out=plane[: 7 * each])
    for k in range(7):
        np.bitwise_and(data[k * each : (k + 1) * each], 1, out=bits)
        np.left_shift(bits, k + 1, out=bits)
        np.bitwise_or(last, bits, out=last)
    plane[8 * each :] = data[7 * each :]
    return plane
