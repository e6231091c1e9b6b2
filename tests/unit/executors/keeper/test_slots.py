"""The memory table of a keeper: budget, adoption, and what is sealed in which slot."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autockpt.executors.image.container import ImageIndex, chunk_digest, trailer_capacity
from autockpt.executors.image.layout.room import Room
from autockpt.executors.keeper import slots as slots_module
from autockpt.executors.keeper.slots import (
    CELL_STEP,
    MemoryTable,
    RankMemory,
)
from autockpt.executors.keeper.wire import SlotsWanted
from autockpt.executors.linux import memory
from autockpt.executors.linux.memory import Arena, Headroom, page_align
from autockpt.values.errors import GuardError, NoRoomError
from autockpt.values.generation import Generation
from tests.contracts.faults import open_descriptors
from tests.unit.executors.image.test_nan_check import image

IMAGE, CHUNK = 3 * 2**16 + 4096, 2**16


@pytest.fixture(autouse=True)
def no_leak() -> Iterator[None]:
    """Slots are closed by whoever opened them."""
    before = open_descriptors()
    yield
    deadline_s = time.monotonic() + 2.0  # threads of earlier tests may just be opening one
    while open_descriptors() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert open_descriptors() <= before


@pytest.fixture
def table() -> Iterator[MemoryTable]:
    """An empty one, emptied at the end."""
    made = MemoryTable()
    yield made
    for rank in made.ranks.values():
        rank.close_slots()


def index(rank: int = 0, step: int = 1, run_id: str = "run") -> ImageIndex:
    """A sealed image of zeros."""
    digest = chunk_digest(memoryview(bytes(CHUNK)))
    return ImageIndex(
        run_id=run_id, generation=Generation(term=1, step=step), step=step, rank=rank, world_size=2,
        layout_digest="ab", image_bytes=IMAGE, chunk_bytes=CHUNK, digests=(digest,) * 4,
    )  # fmt: skip


def allocated(
    table: MemoryTable, rank: int = 0, slots: int = 2, limit: int | None = None
) -> RankMemory:
    """Slots for one rank."""
    return table.allocate(
        SlotsWanted(rank=rank, image_bytes=IMAGE, chunk_bytes=CHUNK, slots=slots, limit_bytes=limit)
    )


def test_slots_hold_an_image_and_its_description(table: MemoryTable) -> None:
    """The capacity is the image's, the trailer comes on top."""
    rank = allocated(table)
    assert len(rank.slots) == 2
    assert rank.image_capacity >= IMAGE
    assert len(rank.image(0, IMAGE)) == IMAGE
    assert table.total_bytes == sum(slot.nbytes for slot in rank.slots)
    assert rank.sealed() == {}


def test_sealed_slots_say_what_they_hold(table: MemoryTable) -> None:
    """Until they are cleared; other ranks' images and other runs' are not ours to report."""
    rank = allocated(table, slots=3)
    rank.seal(0, index(step=1))
    rank.seal(1, index(step=2, run_id="other"))
    rank.seal(2, index(rank=1))
    assert rank.sealed() == {0: index(step=1), 1: index(step=2, run_id="other")}
    (held,) = rank.adopted_shards("run")
    assert (held.slot, held.generation.step, held.root, held.world_size) == (0, 1, index().root, 2)
    rank.clear(0)
    assert rank.adopted_shards("run") == ()


def test_a_new_keeper_adopts_what_the_trainer_kept(table: MemoryTable) -> None:
    """Same memory, same seal, after the first keeper is gone."""
    old = MemoryTable()
    first = allocated(old)
    first.seal(1, index(step=7))
    fds = [os.dup(slot.fd) for slot in first.slots if slot.fd is not None]
    capacity = first.image_capacity
    first.close_slots()
    rank = table.adopt(0, fds, chunk_bytes=CHUNK, image_bytes=capacity)
    assert rank.sealed() == {1: index(step=7)}
    assert rank.image_capacity == capacity


def test_slots_that_are_there_already_are_not_adopted_twice(table: MemoryTable) -> None:
    """The descriptors are closed, the memory stays ours."""
    rank = allocated(table)
    rank.seal(0, index())
    copies = [os.dup(slot.fd) for slot in rank.slots if slot.fd is not None]
    assert table.adopt(0, copies, chunk_bytes=CHUNK, image_bytes=IMAGE) is rank
    assert rank.sealed() == {0: index()}


@pytest.mark.parametrize("claimed", [0, 1, IMAGE * 100])
def test_a_wrong_capacity_finds_nothing_sealed_and_breaks_nothing(
    table: MemoryTable, claimed: int
) -> None:
    """A confused trainer costs its own memory tier only."""
    arena = Arena.create_shared(IMAGE, name="slot")
    assert arena.fd is not None
    rank = table.adopt(0, [os.dup(arena.fd)], chunk_bytes=CHUNK, image_bytes=claimed)
    arena.close()
    assert rank.sealed() == {}


def test_new_slots_replace_the_old_ones(table: MemoryTable) -> None:
    """A grown state; nothing of the old memory stays."""
    rank = allocated(table, slots=3)
    rank.seal(0, index())
    again = table.allocate(SlotsWanted(rank=0, image_bytes=2 * IMAGE, chunk_bytes=CHUNK, slots=2))
    assert again is rank
    assert len(rank.slots) == 2
    assert rank.sealed() == {}


def test_the_limit_is_one_for_the_whole_node(table: MemoryTable) -> None:
    """What other ranks hold counts; a refusal names rank and limit."""
    allocated(table, rank=0)
    both = table.total_bytes
    with pytest.raises(GuardError, match=r"1 slot for rank 1: .*the policy allows"):
        allocated(table, rank=1, limit=int(1.4 * both))
    assert table.of(1).slots == []
    assert len(allocated(table, rank=1, limit=int(1.6 * both)).slots) == 1
    assert len(allocated(table, rank=1, limit=3 * both).slots) == 2


def wanted(rank: int = 0, **more: Any) -> SlotsWanted:
    """Three slots of an image, or a window."""
    given = {"image_bytes": IMAGE, "chunk_bytes": CHUNK, "slots": 3, "may_stream": True, **more}
    return SlotsWanted(rank=rank, **given)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what a control group has left, as if no reserve were kept."""
    monkeypatch.setattr(memory, "reserve_bytes", lambda left, *, swing_bytes=0: 0)

    def leave(nbytes: int) -> None:
        room = Headroom(available_bytes=nbytes, binding="the group", limited=True)
        monkeypatch.setattr(slots_module, "headroom", lambda: room)
        monkeypatch.setattr(memory, "headroom", lambda: room)

    return leave


def test_as_many_slots_are_made_as_fit(table: MemoryTable, left: Callable[[int], None]) -> None:
    """And said is that they are fewer, how many, and why."""
    left(2 * IMAGE + CHUNK)
    assert not table.fits_whole(wanted())
    rank = table.allocate(wanted())
    assert (len(rank.slots), rank.streams) == (2, False)
    assert "3 slots of" in rank.note
    assert "the group has" in rank.note
    assert "made were 2" in rank.note
    left(4 * IMAGE)
    assert table.fits_whole(wanted())
    assert table.allocate(wanted()).note == ""


def test_where_no_image_fits_it_streams_through_a_window(
    table: MemoryTable, left: Callable[[int], None]
) -> None:
    """Its slot is as large as the image and takes no memory; nothing in it is ever held."""
    left(2 * CHUNK)
    rank = table.allocate(wanted())
    assert rank.streams
    assert rank.room == Room(slots=0, window_bytes=2 * CHUNK, chunk_bytes=CHUNK, blocking=True)
    assert rank.image_capacity >= IMAGE
    assert table.total_bytes == 2 * CHUNK
    assert rank.slots[0].fd is not None
    assert os.fstat(rank.slots[0].fd).st_blocks == 0
    rank.seal(0, index())
    assert rank.sealed() == {}
    rank.clear(0)
    assert os.fstat(rank.slots[0].fd).st_blocks == 0


def test_ranks_of_a_node_share_what_is_left(
    table: MemoryTable, left: Callable[[int], None]
) -> None:
    """The first one to ask does not take all of it."""
    left(int(4.5 * IMAGE))
    assert len(table.allocate(wanted(0), sharers=2).slots) == 2


def test_a_host_without_room_says_what_is_missing(
    table: MemoryTable, left: Callable[[int], None]
) -> None:
    """For a slot, and for the least that an image streams through."""
    left(CHUNK)
    said = r"1 slot for rank 0: needs .* of host memory, or 131 kB to stream through; the group "
    with pytest.raises(NoRoomError, match=said + r"has 65\.5 kB left, .*: 65\.5 kB are missing"):
        table.allocate(wanted())
    with pytest.raises(NoRoomError, match=r"needs \d+ kB of host memory; the group"):
        table.allocate(wanted(may_stream=False))
    assert table.of(0).slots == []


def test_a_failure_in_the_middle_gives_the_first_slots_back(
    table: MemoryTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else took the memory meanwhile."""
    real, made = Arena.create_shared, []

    def create(size: int, *, name: str) -> Arena:
        if made:
            raise GuardError("gone meanwhile")
        made.append(name)
        return real(size, name=name)

    monkeypatch.setattr(Arena, "create_shared", create)
    with pytest.raises(GuardError, match="gone meanwhile"):
        allocated(table, slots=3)
    assert table.of(0).slots == []


def test_the_board_is_read_as_numbers(table: MemoryTable) -> None:
    """Without a board everything is 0."""
    rank = table.of(5)
    assert rank.cell(CELL_STEP) == 0
    rank.board = Arena.anonymous(4096)
    rank.board.view[:64].cast("Q")[CELL_STEP] = 41
    assert rank.cell(CELL_STEP) == 41
    assert rank.image_capacity == 0


def test_adopted_memory_with_nan_is_suspect() -> None:
    """The keeper that knew is gone; the next one looks again."""
    for number, health in ((1.5, "good"), (np.nan, "suspect")):
        data = image(w=("F32", np.full(64, number, dtype="<f4").tobytes()))
        table = MemoryTable()
        table.allocate(SlotsWanted(rank=0, image_bytes=len(data), chunk_bytes=2**16, slots=1))
        memory = table.of(0)
        memory.image(0, len(data))[:] = data
        memory.seal(
            0,
            ImageIndex(
                run_id="run", generation=Generation(term=1, step=1), step=1, rank=0, world_size=1,
                layout_digest="", image_bytes=len(data), chunk_bytes=2**16,
                digests=(chunk_digest(memoryview(data)),),
            ),
        )  # fmt: skip
        assert [shard.health for shard in memory.adopted_shards("run")] == [health]
        memory.close_slots()


def test_slots_are_added_one_at_a_time_where_there_is_room(
    table: MemoryTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank has stays as it is; no more than it wants, and none beyond the limit."""
    left = [1.5]

    def host() -> Headroom:
        return Headroom(available_bytes=int(left[0] * slot), binding="the test")

    slot = page_align(IMAGE) + trailer_capacity(IMAGE, CHUNK)
    monkeypatch.setattr(slots_module, "headroom", host)
    monkeypatch.setattr(memory, "headroom", host)
    monkeypatch.setattr(memory, "reserve_bytes", lambda left, *, swing_bytes=0: 0)
    wanted = SlotsWanted(rank=0, image_bytes=IMAGE, chunk_bytes=CHUNK, slots=3, more=True)
    rank = table.allocate(wanted)
    assert len(rank.slots) == 1
    assert "made were 1" in rank.note
    rank.seal(0, index())
    (first,) = rank.slots
    left[0] = 0.5
    assert not table.add_slot(wanted)
    left[0] = 9.0
    assert not table.add_slot(replace(wanted, limit_bytes=2 * slot - 1))
    assert table.add_slot(wanted)
    assert len(rank.slots) == 2
    assert rank.note.startswith("2 of 3 slots")
    assert table.add_slot(wanted)
    assert len(rank.slots) == 3
    assert not rank.note
    assert not table.add_slot(wanted)
    assert len(rank.slots) == 3
    assert rank.slots[0] is first
    assert list(rank.sealed()) == [0]
    assert len({one.nbytes for one in rank.slots}) == 1
