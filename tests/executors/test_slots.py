"""The memory table of a keeper: budget, adoption, and what is sealed in which slot."""

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from autockpt.executors import memory
from autockpt.executors.image import ImageIndex, chunk_digest
from autockpt.executors.keeper.slots import (
    CELL_STEP,
    MemoryTable,
    RankMemory,
)
from autockpt.executors.memory import Arena, Headroom
from autockpt.values.errors import GuardError
from autockpt.values.generation import Generation
from tests.contracts.faults import open_descriptors
from tests.executors.test_health import image

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


def index(rank: int = 0, seq: int = 1, run_id: str = "run") -> ImageIndex:
    """A sealed image of zeros."""
    digest = chunk_digest(memoryview(bytes(CHUNK)))
    return ImageIndex(
        run_id=run_id, generation=Generation(epoch=1, seq=seq), step=seq, rank=rank, world_size=2,
        layout_digest="ab", image_bytes=IMAGE, chunk_bytes=CHUNK, digests=(digest,) * 4,
    )  # fmt: skip


def allocated(
    table: MemoryTable, rank: int = 0, slots: int = 2, limit: int | None = None
) -> RankMemory:
    """Slots for one rank."""
    return table.allocate(
        rank, image_bytes=IMAGE, chunk_bytes=CHUNK, slots=slots, limit_bytes=limit
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
    rank.seal(0, index(seq=1))
    rank.seal(1, index(seq=2, run_id="other"))
    rank.seal(2, index(rank=1))
    assert rank.sealed() == {0: index(seq=1), 1: index(seq=2, run_id="other")}
    (held,) = rank.held("run")
    assert (held.slot, held.generation.seq, held.root, held.world_size) == (0, 1, index().root, 2)
    rank.clear(0)
    assert rank.held("run") == ()


def test_a_new_keeper_adopts_what_the_trainer_kept(table: MemoryTable) -> None:
    """Same memory, same seal, after the first keeper is gone."""
    old = MemoryTable()
    first = allocated(old)
    first.seal(1, index(seq=7))
    fds = [os.dup(slot.fd) for slot in first.slots if slot.fd is not None]
    capacity = first.image_capacity
    first.close_slots()
    rank = table.adopt(0, fds, chunk_bytes=CHUNK, image_bytes=capacity)
    assert rank.sealed() == {1: index(seq=7)}
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
    again = table.allocate(0, image_bytes=2 * IMAGE, chunk_bytes=CHUNK, slots=2, limit_bytes=None)
    assert again is rank
    assert len(rank.slots) == 2
    assert rank.sealed() == {}


def test_the_limit_is_one_for_the_whole_node(table: MemoryTable) -> None:
    """What other ranks hold counts; a refusal names rank and limit."""
    allocated(table, rank=0)
    limit = int(table.total_bytes * 1.5)
    with pytest.raises(GuardError, match=r"2 slots of .* for rank 1: .*the policy allows"):
        allocated(table, rank=1, limit=limit)
    assert table.of(1).slots == []
    assert len(allocated(table, rank=1, limit=2 * limit).slots) == 2


def test_all_slots_are_checked_before_the_first_is_allocated(
    table: MemoryTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three would be memory taken for nothing."""
    room = Headroom(available_bytes=memory.RESERVE_BYTES + 2 * IMAGE, binding="the host")
    monkeypatch.setattr(memory, "headroom", lambda: room)
    with pytest.raises(GuardError, match="3 slots of"):
        allocated(table, slots=3)


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
        table.allocate(0, image_bytes=len(data), chunk_bytes=2**16, slots=1, limit_bytes=None)
        memory = table.of(0)
        memory.image(0, len(data))[:] = data
        memory.seal(
            0,
            ImageIndex(
                run_id="run", generation=Generation(epoch=1, seq=1), step=1, rank=0, world_size=1,
                layout_digest="", image_bytes=len(data), chunk_bytes=2**16,
                digests=(chunk_digest(memoryview(data)),),
            ),
        )  # fmt: skip
        assert [shard.health for shard in memory.held("run")] == [health]
        memory.close_slots()
