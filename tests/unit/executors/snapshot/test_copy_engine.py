"""The copy thread: order, who waits for how much, what a failure leaves, and one counter a slot."""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autockpt.executors.keeper.slots import (
    BOARD_BYTES,
    CELL_COPIED,
    CELL_MARK,
    CELL_STEP,
    MAX_SLOTS,
    MemoryTable,
)
from autockpt.executors.keeper.wire import SlotsWanted
from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot import copy_engine
from autockpt.executors.snapshot.copy_engine import (
    PIECE_BYTES,
    CopyEngine,
    CopyJob,
    CopyTask,
    ProgressCounter,
    run_jobs,
)
from autockpt.executors.state.live_state import LiveState
from autockpt.values.errors import GuardError
from tests.unit.executors.shots import (
    PATIENCE_S,
    Barrier,
    assert_image,
    counters,
    held,
    saved,
    shoot,
    slot_for,
    snapshotter,
    state_bytes,
)
from tests.unit.executors.states import Module


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    """Ended at the end."""
    made = CopyEngine()
    yield made
    made.close()
    assert not made._thread.is_alive()


def task(*jobs: CopyJob, slot: int = 0) -> CopyTask:
    """A copy with a counter of its own."""
    return CopyTask(jobs=list(jobs), publish=ProgressCounter(counters(), slot))


class Note:
    """An event that only says that its turn came."""

    def __init__(self, notes: list[str], name: str) -> None:
        self._notes, self._name = notes, name

    def synchronize(self) -> None:
        self._notes.append(self._name)

    def job(self, end: int = 1) -> CopyJob:
        return CopyJob(end, 0, 0, 0, event=self)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """Started; the test joins it."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# --- order ---------------------------------------------------------------------------------------


def test_copies_are_made_in_the_order_in_which_they_were_begun(engine: CopyEngine) -> None:
    """Task by task, job by job; what stands first in a task comes before its other jobs."""
    notes: list[str] = []
    for name in "ab":
        one = task(*(Note(notes, f"{name}{i}").job(i) for i in (1, 2)))
        one.first = [Note(notes, f"{name}0").job()]
        one.last = lambda _, name=name: notes.append(f"{name}!")
        engine.start(one)
    engine.wait()
    assert notes == ["a0", "a1", "a2", "a!", "b0", "b1", "b2", "b!"]


def test_whoever_waits_goes_on_when_his_part_is_there(engine: CopyEngine) -> None:
    """An optimizer does not wait for another one's tensors."""
    barrier = Barrier()
    one = task(Note([], "").job(100), barrier.job(200))
    engine.start(one)
    engine.wait_for(lambda: one.copied >= 100)
    assert barrier.reached.wait(PATIENCE_S)
    assert one.copied == one.publish.get() == 100
    waiting = in_thread(lambda: engine.wait_for(lambda: one.copied >= 200))
    assert engine.busy
    barrier.opened.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_first_jobs_are_done_before_a_device_is_waited_for_and_publish_nothing(
    engine: CopyEngine,
) -> None:
    """The keeper follows a prefix; a host tensor somewhere in the middle is none."""
    barrier = Barrier()
    one = task(barrier.job(50))
    one.first = [Note([], "").job(40)]
    engine.start(one)
    engine.wait_for(lambda: one.first_done)
    assert one.publish.get() == 0
    assert one.copied == 0
    barrier.opened.set()
    engine.wait()
    assert one.publish.get() == 50


def test_a_wait_for_what_is_there_does_not_wait(engine: CopyEngine) -> None:
    """Nor does a new engine have anything to wait for."""
    assert not engine.busy
    assert engine.wait() == 0.0
    with held(engine):
        assert engine.wait_for(lambda: True) == 0.0
    assert engine.wait() >= 0.0


def test_waiting_for_the_newest_waits_for_all_before_it(engine: CopyEngine) -> None:
    """Also for what is called at their end."""
    notes: list[str] = []
    with held(engine) as barrier:
        one = task()
        one.last = lambda _: notes.append("told")
        engine.start(one)
        engine.start(task(Note(notes, "copied").job()))
        assert notes == []
        barrier.opened.set()
        engine.wait()
        assert notes == ["told", "copied"]


def test_a_copy_has_not_ended_before_everybody_was_told(engine: CopyEngine) -> None:
    """Who is told still publishes in the slot: it is nobody else's before that."""
    barrier, one = Barrier(), task()
    one.last = lambda _: barrier.synchronize()
    engine.start(one)
    assert barrier.reached.wait(PATIENCE_S)
    assert engine.busy
    barrier.opened.set()
    engine.wait()
    assert not engine.busy


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["first", "jobs"])
def test_a_job_that_fails_ends_its_own_copy_only(engine: CopyEngine, where: str) -> None:
    """Nothing after it is copied or published, nobody waits for ever, the next one is good."""

    class Bad:
        def synchronize(self) -> None:
            raise MemoryError("no more")

    notes: list[str] = []
    one = task(Note(notes, "before").job(10))
    getattr(one, where).append(CopyJob(20, 0, 0, 0, event=Bad()))
    one.jobs.append(Note(notes, "after").job(30))
    engine.start(one)
    engine.wait()
    assert isinstance(one.error, MemoryError)
    assert one.first_done
    assert one.copied == math.inf
    assert notes == ([] if where == "first" else ["before"])
    assert one.publish.get() == (0 if where == "first" else 10)
    good = task(Note(notes, "good").job(7))
    engine.start(good)
    engine.wait()
    assert (good.error, good.publish.get()) == (None, 7)


def test_a_listener_that_fails_does_not_end_the_thread(engine: CopyEngine) -> None:
    """Every later fence waits for this thread: without it the training would stand still."""

    def explode(_: CopyTask) -> None:
        raise RuntimeError("a bug of ours")

    one = task()
    one.last = explode
    engine.start(one)
    engine.wait()
    assert isinstance(one.error, RuntimeError)
    good = task(Note([], "").job(7))
    engine.start(good)
    engine.wait()
    assert good.publish.get() == 7


def test_closing_finishes_what_was_begun() -> None:
    """The last snapshot of a run is not cut off."""
    engine = CopyEngine()
    with held(engine) as barrier:
        last = task(Note([], "").job(9))
        engine.start(last)
        closing = in_thread(engine.close)
        barrier.opened.set()
        closing.join(PATIENCE_S)
    assert last.publish.get() == 9
    assert not engine.busy


# --- pieces --------------------------------------------------------------------------------------


def test_a_large_copy_publishes_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper digests behind the copy; no piece is claimed before it is there."""
    monkeypatch.setattr(copy_engine, "PIECE_BYTES", 1000)
    source, target = Arena.anonymous(4096), Arena.anonymous(4096)
    source.view[:] = bytes(range(256)) * 16
    seen: list[tuple[int, bool]] = []

    class Watched(ProgressCounter):
        def set(self, copied: int) -> None:
            done = copied - 100
            seen.append((copied, target.view[:done] == source.view[:done]))

    job = CopyJob(100 + 2500, target.address, source.address, 2500)
    run_jobs([job], Watched(counters()))
    assert seen == [(1100, True), (2100, True), (2600, True), (2600, True)]
    assert not any(target.view[2500:])
    assert PIECE_BYTES % 4096 == 0


# --- counters ------------------------------------------------------------------------------------


def test_each_slot_has_a_counter_of_its_own() -> None:
    """Setting one leaves all others, and 64 bits are 64 bits."""
    cells = counters(5)
    first = ProgressCounter(cells)
    for slot in range(5):
        first.of(slot).set(2**40 + slot)
    assert [first.of(slot).get() for slot in range(5)] == [2**40 + slot for slot in range(5)]
    first.of(3).set(0)
    assert list(cells.cast("Q")) == [2**40, 2**40 + 1, 2**40 + 2, 0, 2**40 + 4]


def test_a_counter_that_is_not_there_is_an_error_and_touches_nothing() -> None:
    """A board ends somewhere; a rest of less than a cell is no cell."""
    cells = memoryview(bytearray(8 * 2 + 7))
    with pytest.raises(IndexError, match="out of bounds"):
        ProgressCounter(cells).of(2).set(1)
    assert bytes(cells) == bytes(23)


def test_a_board_has_a_cell_for_every_slot_that_is_allowed_and_for_no_more() -> None:
    """The last counter is the last cell, and none of them is one of the session's cells."""
    board = Arena.anonymous(BOARD_BYTES)
    counter = ProgressCounter(board.view[8 * CELL_COPIED : 8 * CELL_MARK])
    for slot in range(MAX_SLOTS):
        counter.of(slot).set(slot + 1)
    with pytest.raises(IndexError, match="out of bounds"):
        counter.of(MAX_SLOTS).set(1)
    memory = MemoryTable().of(0)
    memory.board = board
    assert [memory.copied(slot) for slot in (0, 1, MAX_SLOTS - 1)] == [1, 2, MAX_SLOTS]
    assert not any(memory.cell(cell) for cell in range(CELL_STEP, CELL_COPIED))


def test_more_slots_than_counters_are_refused() -> None:
    """Before any memory is asked for."""
    table = MemoryTable()
    with pytest.raises(GuardError, match=f"at most {MAX_SLOTS} per rank; lower memory.slots"):
        table.allocate(SlotsWanted(rank=0, image_bytes=1, chunk_bytes=4096, slots=MAX_SLOTS + 1))
    assert table.of(0).slots == []


def test_slots_are_filled_in_turn_and_keep_what_they_hold() -> None:
    """All of them exactly once, then round again three times; only its own image ever changes."""
    model: Any = Module([("w", torch.zeros(3000)), ("b", torch.zeros(7))])
    state = LiveState.of(model=model)
    slots = 8
    with snapshotter(state, slots) as shooter:
        arenas = [slot_for(shooter) for _ in range(slots)]
        expected: list[dict[str, bytes]] = [{} for _ in arenas]
        for turn in range(4 * slots):
            slot = turn % slots
            model.w.data += 1
            model.b.data -= turn
            before = [shooter.counters.of(other).get() for other in range(slots)]
            snapshot = shooter.begin(arenas[slot], {"step": turn}, lazy=True, slot=slot)
            assert shooter.fence() == []
            expected[slot] = state_bytes(state)
            before[slot] = snapshot.layout.image_bytes
            assert [shooter.counters.of(other).get() for other in range(slots)] == before
            for arena, image in zip(arenas, expected, strict=True):
                if image:
                    assert_image(arena, image)


def test_a_slot_that_is_begun_again_starts_at_nothing() -> None:
    """The keeper must not take the last image's progress for this one's."""
    state = LiveState.of(model=Module([("w", torch.zeros(3000))]))
    with snapshotter(state) as shooter:
        arena = slot_for(shooter)
        shoot(shooter, arena)
        seen: list[int] = []
        with held(shooter.engine):
            shooter.begin(
                arena, {"step": 2}, lazy=True, began=lambda _: seen.append(shooter.counters.get())
            )
            seen.append(shooter.counters.get())
        layout = shooter.plan({"step": 2})
        assert seen == [0, layout.boundary_end]
        assert shooter.fence() == []
        assert saved(arena)["model.w"] == bytes(12000)
