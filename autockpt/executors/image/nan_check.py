"""Is a state worth coming back to?  One whose parameters or optimizer state hold NaN is not.

Such a generation is *suspect*: it is stored, but never restored by itself, and it pushes no other
one out.  Every seal scans a sixteenth of the image, each time another one (a NaN gradient is
everywhere one step later).  Before a generation counts as verified, the scrub scans all of it.
Infinities are no verdict: masks hold them for a reason.  The scan leaves out data that is copied at
the boundary (buffers, objects of the user) where it is distinguishable.  It also leaves out tensors
that held NaN before the training: either they are unused, or all others are NaN one step later.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autockpt.executors.image.container import ImageHeader, header_bytes, read_header
from autockpt.values.errors import CorruptCheckpointError
from autockpt.values.generation import Generation

BLOCK_BYTES = 2**16
SAMPLED = 16
"""At a seal one block of so many is looked at."""
SMALL_BYTES = 4 * SAMPLED * BLOCK_BYTES
"""An image up to this is looked at as a whole."""
_WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LARGEST = {"F16": 0x7C00, "BF16": 0x7F80}
"""Bits of infinity: a greater value, without its sign, is NaN."""


@dataclass(frozen=True, slots=True)
class Floats:
    """A tensor of floating-point numbers in an image."""

    start: int
    stop: int
    kind: str
    name: str


def floats_of(header: ImageHeader, *, beyond: int) -> tuple[Floats, ...]:
    """Return the floats that begin at or after byte `beyond`, in the order of their bytes."""
    found = [
        Floats(place.start, place.stop, place.dtype, name)
        for name, place in header.tensors.items()
        if place.dtype in _WIDTH
        and place.start >= beyond
        and place.stop > place.start
        and name not in header.known_nan
    ]
    return tuple(sorted(found, key=lambda one: one.start))


def floats_in(image: memoryview, *, beyond: int) -> tuple[Floats, ...]:
    """Return the floats of an image by its own header; none if the header is damaged."""
    try:
        size = header_bytes(image, len(image))
        return floats_of(read_header(bytes(image[:size]), len(image)), beyond=beyond)
    except CorruptCheckpointError:
        return ()


def first_nan(floats: Sequence[Floats], start: int, data: memoryview) -> str:
    """Name of the first tensor with a NaN in the bytes [start, start + len(data)), or ""."""
    first = max(0, bisect.bisect_right(floats, start, key=lambda one: one.start) - 1)
    for at in range(first, len(floats)):
        one = floats[at]
        if one.start >= start + len(data):
            break
        width = _WIDTH[one.kind]
        low = one.start + -(-max(0, start - one.start) // width) * width
        count = (min(one.stop, start + len(data)) - low) // width
        if count > 0 and _has_nan(one.kind, data[low - start : low - start + count * width]):
            return one.name
    return ""


def sampled_nan(floats: Sequence[Floats], image: memoryview, turn: int) -> str:
    """As `first_nan`, in one block of SAMPLED; which ones depends on `turn`."""
    if len(image) <= SMALL_BYTES:
        return first_nan(floats, 0, image)
    for start in range(turn % SAMPLED * BLOCK_BYTES, len(image), SAMPLED * BLOCK_BYTES):
        name = first_nan(floats, start, image[start : start + BLOCK_BYTES])
        if name:
            return name
    return ""


class NanScan:
    """Looks at an image whose pieces come in order; the header is taken from the first of them.

    Pieces of a damaged chunk are scanned too; their findings are void.
    """

    def __init__(self, image_bytes: int, *, beyond: int) -> None:
        self._image_bytes, self._beyond = image_bytes, beyond
        self._held = bytearray()
        """The header as far as it was taken."""
        self._taken = 0
        """Bytes of the pieces so far."""
        self._floats: tuple[Floats, ...] | None = None
        self.found = ""
        """The first tensor with a NaN."""

    def take(self, start: int, data: memoryview) -> None:
        """The bytes from `start` on.  An image without a sound header is not judged."""
        if self.found:
            return
        if self._floats is None and not self._take_header(data):
            return
        assert self._floats is not None
        self.found = first_nan(self._floats, start, data)

    def _take_header(self, data: memoryview) -> bool:
        """Whether the header is whole with this piece, of which no more than that is copied."""
        begin, self._taken = self._taken, self._taken + len(data)
        try:
            self._hold(8, begin, data)
            if len(self._held) < 8:
                return False
            size = header_bytes(memoryview(bytes(self._held[:8])), self._image_bytes)
            self._hold(size, begin, data)
            if len(self._held) < size:
                return False
            header = read_header(bytes(self._held), self._image_bytes)
            self._floats = floats_of(header, beyond=self._beyond)
        except CorruptCheckpointError:
            self._floats = ()
        self._held.clear()
        return True

    def _hold(self, size: int, begin: int, data: memoryview) -> None:
        """Takes of a piece that begins at `begin` what the first `size` bytes still lack."""
        self._held += data[len(self._held) - begin : max(0, size - begin)]


def sick_state(generation: Generation, rank: int, tensor: str) -> str:
    """Return the message about a suspect generation."""
    return (
        f"checkpoint {generation}: rank {rank} has NaN in {tensor}; it is kept, but it is neither "
        f"restored by itself nor does it push older ones out (--resume-from {generation.name} does)"
    )


def _has_nan(kind: str, data: memoryview) -> bool:
    """The largest of numbers is NaN if one of them is."""
    import numpy as np  # the keeper starts without it

    if kind in _LARGEST:
        pieces = (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
        bits = (np.frombuffer(piece, dtype=np.uint16) for piece in pieces)
        return any(bool((one & 0x7FFF).max() > _LARGEST[kind]) for one in bits)
    numbers: np.ndarray[Any, Any] = np.frombuffer(data, dtype="<f8" if kind == "F64" else "<f4")
    return bool(np.isnan(numbers.max()))
