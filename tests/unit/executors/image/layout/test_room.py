"""The ladder of what a rank's checkpoints may take of the host memory that is left."""

from hypothesis import given
from hypothesis import strategies as st

from autockpt.executors.image.layout.room import (
    DIRECT_CHUNK_BYTES,
    RESERVE_BYTES,
    SMALL_CHUNK_BYTES,
    Room,
    find_room,
    reserve_bytes,
    smallest_window,
)

MIB = 2**20
BYTES = st.integers(0, 2**42)


def found(available: int, *, slots: int = 3, chunk: int = 8 * MIB, stream: bool = True) -> Room:
    """For images of 150 MiB."""
    room = find_room(
        slot_bytes=150 * MIB, slots=slots, chunk_bytes=chunk, available_bytes=available,
        may_stream=stream,
    )  # fmt: skip
    assert room is not None
    return room


def test_the_ladder_goes_down_with_what_is_left() -> None:
    """All slots, fewer, a window of the plan's chunks, one of smaller ones, the smallest."""
    assert found(10_000 * MIB) == Room(slots=3)
    assert found(449 * MIB) == Room(slots=2)
    assert found(150 * MIB) == Room(slots=1)
    assert found(149 * MIB) == Room(slots=0, window_bytes=64 * MIB, chunk_bytes=8 * MIB)
    assert found(40 * MIB) == Room(slots=0, window_bytes=40 * MIB, chunk_bytes=8 * MIB)
    assert found(31 * MIB) == Room(slots=0, window_bytes=8 * MIB, chunk_bytes=SMALL_CHUNK_BYTES)
    assert found(3 * MIB) == Room(
        slots=0, window_bytes=2 * DIRECT_CHUNK_BYTES, chunk_bytes=DIRECT_CHUNK_BYTES, blocking=True
    )
    assert (
        find_room(
            slot_bytes=150 * MIB, slots=3, chunk_bytes=8 * MIB, available_bytes=MIB // 2 - 1,
            may_stream=True,
        )
        is None
    )  # fmt: skip


@given(
    available=BYTES, slot=st.integers(1, 2**40), slots=st.integers(1, 64),
    chunk=st.integers(1, 2**14).map(lambda n: 4096 * n), stream=st.booleans(),
)  # fmt: skip
def test_what_is_given_fits_and_something_is_given_where_anything_does(
    available: int, slot: int, slots: int, chunk: int, *, stream: bool
) -> None:
    """A window holds two chunks at least: one that is copied and one that is written."""
    room = find_room(
        slot_bytes=slot, slots=slots, chunk_bytes=chunk, available_bytes=available,
        may_stream=stream,
    )  # fmt: skip
    fits = available >= slot or (stream and available >= smallest_window(chunk)[0])
    assert (room is not None) is fits
    if room is None:
        return
    assert room.slots * slot + room.window_bytes <= available
    assert 0 <= room.slots <= slots
    assert (room.slots == 0) is (room.window_bytes > 0)
    if room.window_bytes:
        assert stream
        assert available < slot
        assert room.chunk_bytes <= chunk
        assert room.window_bytes % room.chunk_bytes == 0
        assert room.window_bytes >= 2 * room.chunk_bytes
        assert room.chunk_bytes % 4096 == 0


@given(left=st.integers(-(2**30), 2**42), swing=BYTES)
def test_the_training_keeps_a_quarter_and_what_it_swings_by(left: int, swing: int) -> None:
    """Of much, no more than is known to be needed; of little, never everything."""
    reserve = reserve_bytes(left, swing_bytes=swing)
    assert 0 <= reserve <= max(0, left // 2, min(left // 4, RESERVE_BYTES))
    assert reserve >= min(RESERVE_BYTES, max(0, left) // 4)
    if 0 < swing <= left // 2:
        assert reserve >= swing
    assert reserve_bytes(left) <= RESERVE_BYTES
