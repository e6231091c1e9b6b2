"""How the checkpoints of a rank pass through the host memory that is left: a ladder.

1. As many slots as were asked for: each holds an image whole.
2. Fewer slots.
3. A window: the image streams to storage through a few chunks of memory, under forward and
   backward.  No image stays in memory.
4. The smallest window, while the training waits at the boundary.

The first step that fits is taken.  Only arithmetic lives here.
"""

from dataclasses import dataclass

STREAM_CHUNKS = 8
"""Chunks of the largest window: one being copied, one being digested, the others being written."""
LEAST_CHUNKS = 4
"""Chunks of the smallest window under which the training goes on."""
SMALL_CHUNK_BYTES = 2**20
"""Chunk size of a window where chunks of the plan are too large."""
DIRECT_CHUNK_BYTES = 2**18
DIRECT_CHUNKS = 2
"""Chunks of the smallest window: one chunk is copied while the other one is written."""

RESERVE_BYTES = 512 * 2**20
"""Host memory never taken, where there is much: the training's own allocations fluctuate by about
this much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that one rank gets."""

    slots: int
    """Images that are held whole; 0: the image streams through the window."""
    window_bytes: int = 0
    """Memory that an image streams through; 0: there are slots."""
    chunk_bytes: int = 0
    """Unit of digests and writes of a streamed image."""
    blocking: bool = False
    """The training waits at the boundary until the image is through."""


def find_room(
    *, slot_bytes: int, slots: int, chunk_bytes: int, available_bytes: int, may_stream: bool
) -> Room | None:
    """The first step of the ladder that fits `available_bytes`; None: none does."""
    fit = min(slots, available_bytes // slot_bytes)
    if fit > 0:
        return Room(slots=fit)
    if not may_stream:
        return None
    for chunk in (chunk_bytes, SMALL_CHUNK_BYTES):
        count = min(STREAM_CHUNKS, available_bytes // chunk)
        if chunk <= chunk_bytes and count >= LEAST_CHUNKS:
            return Room(slots=0, window_bytes=count * chunk, chunk_bytes=chunk)
    window, chunk = smallest_window(chunk_bytes)
    if available_bytes >= window:
        return Room(slots=0, window_bytes=window, chunk_bytes=chunk, blocking=True)
    return None


def smallest_window(chunk_bytes: int) -> tuple[int, int]:
    """(bytes, bytes of a chunk) of the last step of the ladder."""
    chunk = min(DIRECT_CHUNK_BYTES, chunk_bytes)
    return DIRECT_CHUNKS * chunk, chunk


def reserve_bytes(left_bytes: int, *, swing_bytes: int = 0) -> int:
    """Of the memory that is left what the training keeps: a quarter, up to `RESERVE_BYTES`.

    `swing_bytes`: by so much the training has used more than now; it keeps that too, up to half.
    """
    left = max(0, left_bytes)
    return max(min(RESERVE_BYTES, left // 4), min(swing_bytes, left // 2))
