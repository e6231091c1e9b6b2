"""Planes that need fewer than eight bits a byte in any order: nibbles and sevens.

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

from autockpt.executors.image.codecs.planes.elements import Bytes, scratch
from autockpt.executors.image.codecs.zstd import pieces
from autockpt.values.errors import CorruptCheckpointError

HEAD = struct.Struct("<BI")
VALUES = 15
BLOCK = 2**16
"""Bytes that are packed at a time: with what comes of them in a first- or second-level cache."""


class Nibbles:
    """Packs a plane that comes a block at a time."""

    def __init__(self, lowest: int, into: Bytes) -> None:
        """`into`: as long as the plane, rounded up to even; half of it is for escapes."""
        self._lowest = np.uint8(lowest)
        self._room, self._at = len(into) // 2, len(into) // 2
        self._into = into
        self._odd = np.empty(0, np.uint8)
        self._escapes: list[Bytes] = []

    def add(self, block: Bytes) -> None:
        """The next bytes of the plane, which may be given other ones afterwards."""
        if len(self._odd) or len(block) % 2:
            block = np.concatenate([self._odd, block])
            even = len(block) // 2 * 2
            self._odd, block = block[even:], block[:even]
        for at in range(0, len(block), BLOCK):
            self._pack(block[at : at + BLOCK])

    def end(self) -> tuple[Bytes, int] | None:
        """(escapes and nibbles, how many are escapes); None where those are more than half."""
        if len(self._odd):
            self._pack(np.append(self._odd, self._lowest))
        lost = sum(map(len, self._escapes))
        if lost > self._room:
            return None
        if lost:
            np.concatenate(self._escapes, out=self._into[self._room - lost : self._room])
        return self._into[self._room - lost : self._at], lost

    def plane(self, count: int) -> Bytes:
        """Return all bytes added so far, at most `count`."""
        values = _unpacked(self._into[self._room : self._at])[:count]
        found = values == VALUES
        values += self._lowest
        if found.any():
            values[found] = np.concatenate(self._escapes)
        return values

    def _pack(self, block: Bytes) -> None:
        count = len(block)
        values, high = scratch.of("nibbles", 1, count), scratch.of("high", 1, count)
        np.subtract(block, self._lowest, out=values)
        # numpy's minimum of bytes takes ten times as long as this.
        np.greater_equal(values, VALUES, out=high.view(bool))
        found = np.flatnonzero(high.view(bool))
        if len(found):
            self._escapes.append(block[found])
            values[found] = VALUES
        two, both = values.view("<u2"), high.view("<u2")
        np.right_shift(two, 4, out=both)
        np.bitwise_or(both, two, out=both)
        np.copyto(self._into[self._at : self._at + len(both)], both, casting="unsafe")
        self._at += len(both)


def pack(plane: Bytes, lowest: int) -> tuple[Bytes, int] | None:
    """A whole plane as `Nibbles` end with it."""
    nibbles = Nibbles(lowest, np.empty(len(plane) + len(plane) % 2, np.uint8))
    nibbles.add(plane)
    return nibbles.end()


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


def pack_sevens(plane: Bytes) -> Bytes | None:
    """The plane as sevens; None where a lowest bit is set."""
    count = len(plane) // 8
    whole, rest = plane[: 8 * count], plane[8 * count :]
    if int(np.bitwise_or.reduce(whole.view(np.uint64))) & 0x0101010101010101 or (rest & 1).any():
        return None
    into, bits = np.empty(sevens_bytes(len(plane)), np.uint8), np.empty(count, np.uint8)
    for k in range(7):
        piece = into[k * count : (k + 1) * count]
        np.right_shift(whole[7 * count :], k + 1, out=bits)
        np.bitwise_and(bits, 1, out=bits)
        np.bitwise_or(whole[k * count : (k + 1) * count], bits, out=piece)
    into[7 * count :] = rest
    return into


def unpack_sevens(data: Bytes, count: int) -> Bytes:
    """The plane of `sevens_bytes`."""
    plane, each = np.empty(count, np.uint8), count // 8
    last, bits = plane[7 * each : 8 * each], np.empty(each, np.uint8)
    last[:] = 0
    np.bitwise_and(data[: 7 * each], 0xFE, out=plane[: 7 * each])
    for k in reversed(range(7)):
        np.bitwise_and(data[k * each : (k + 1) * each], 1, out=bits)
        np.bitwise_or(last, bits, out=last)
        np.add(last, last, out=last)
    plane[8 * each :] = data[7 * each :]
    return plane
