"""Marks of a rank's traffic, from its trainer to its keeper through a page of memory."""

import pytest

from autockpt.executors.keeper.client.traffic_marks import Kind, MarkReader, MarkWriter
from autockpt.executors.keeper.slots import (
    BOARD_BYTES,
    CELL_COPIED,
    CELL_STEP,
    MARKS,
    MAX_SLOTS,
    RankMemory,
)
from autockpt.executors.linux.memory import Arena
from tests.contracts.gate_contract import FakeClock


class Board:
    """A page with both ends."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.arena, self.clock = Arena.anonymous(BOARD_BYTES), FakeClock()
        self.clock.now_s = now_s
        self.writer = MarkWriter(self.arena.view, self.clock.now)
        self.reader = MarkReader(self.arena.view, self.clock.now)


@pytest.mark.parametrize("now_s", [0.0, 1000.0, 2**38 / 1e6 - 0.01, 3e7])
def test_marks_are_read_as_they_were_made(now_s: float) -> None:
    """In order, with their times to the microsecond, also where the kept part of these wraps."""
    board = Board(now_s)
    board.writer.spread(7)
    for what in ("all_reduce", "broadcast", "all_reduce"):
        board.writer.began(what)
        board.clock.now_s += 0.004
        board.writer.ended(what)
    board.writer.step_began()
    board.clock.now_s += 0.01
    board.writer.boundary()
    board.clock.now_s += 5.0
    marks = board.reader.read()
    assert [m.kind for m in marks] == [
        *(Kind.BEGAN, Kind.ENDED) * 3, Kind.STEP_BEGAN, Kind.BOUNDARY,
    ]  # fmt: skip
    assert marks[0].what == marks[1].what == marks[4].what != marks[2].what
    times = [m.at_s - now_s for m in marks]
    expected = [0.0, 0.004, 0.004, 0.008, 0.008, 0.012, 0.012, 0.022]
    assert times == pytest.approx(expected, abs=2e-6)
    assert board.reader.read() == []
    assert board.reader.spread == 7


def test_what_was_written_over_is_lost_and_the_rest_is_read() -> None:
    """A keeper that looks rarely reads the newest ones."""
    board = Board()
    for number in range(2 * MARKS):
        board.clock.now_s = 1000.0 + number
        board.writer.boundary()
    marks = board.reader.read()
    assert MARKS - 1 <= len(marks) <= MARKS
    assert marks[-1].at_s == pytest.approx(1000.0 + 2 * MARKS - 1)
    board.writer.boundary()
    assert len(board.reader.read()) == 1


def test_a_reader_begins_with_the_marks_that_are_made_from_then_on() -> None:
    """A new keeper does not learn from what was long ago."""
    board = Board()
    board.writer.boundary()
    assert MarkReader(board.arena.view, board.clock.now).read() == []


def test_marks_touch_neither_the_step_nor_the_progress_of_slots() -> None:
    """All of them share one page."""
    board = Board()
    memory = RankMemory(rank=0, board=board.arena)
    for _ in range(3 * MARKS):
        board.writer.began("all_reduce")
    assert memory.cell(CELL_STEP) == 0
    assert not any(memory.cell(CELL_COPIED + slot) for slot in range(MAX_SLOTS))
