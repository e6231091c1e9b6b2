"""Copies leave in the windows of the network, or at the rate where these can not be counted on."""

import math
import time
from collections.abc import Callable

import pytest

from autockpt.executors.keeper.client.traffic_marks import MarkWriter
from autockpt.executors.keeper.replication.network_windows import LinkWindows, NodeWindows
from autockpt.executors.keeper.slots import BOARD_BYTES, CELL_SPREAD, RankMemory
from autockpt.executors.linux.memory import Arena
from autockpt.executors.throttle.idle_windows import WindowUse
from autockpt.executors.throttle.window_forecast import LEARNED
from tests.contracts.gate_contract import FakeClock

MIB = 2**20
LINK = 100 * MIB
"""Bytes per second that the line takes."""
REDUCE_S, GAP_S, LAYERS = 0.02, 0.05, 4


class Training:
    """A trainer whose iterations run on a clock: gaps and collectives; marks are made in time."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.clock.now_s = 100.0
        self.board = Arena.anonymous(BOARD_BYTES)
        self.marks = MarkWriter(self.board.view, self.clock.now)
        self.marks.spread(1)
        self.told: list[tuple[WindowUse, float]] = []
        self.rate = 0.0
        self.windows = LinkWindows(
            self.board.view, lambda: self.rate, lambda *use: self.told.append(use),
            now_s=self.clock.now, sleep=self.wait_for_news,
        )  # fmt: skip
        self._ahead: list[tuple[float, Callable[[], None]]] = []
        self.running = True

    def sleep(self, seconds: float) -> None:
        """Time passes for everybody: what was due is marked and heard on the way."""
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.wait_for_news(until_s - self.clock.now_s)

    def wait_for_news(self, seconds: float) -> None:
        """Until the next mark, or for so long."""
        until_s, at_s = self.clock.now_s + max(seconds, 1e-4), self._next_s()
        self.clock.now_s = max(self.clock.now_s, min(at_s, until_s))
        if at_s <= until_s:
            self._ahead.pop(0)[1]()
            self.windows.hear()

    def _next_s(self) -> float:
        if not self._ahead and self.running:
            self._plan_iteration()
        return self._ahead[0][0] if self._ahead else math.inf

    def _plan_iteration(self) -> None:
        at_s = self.clock.now_s
        for _ in range(LAYERS):
            at_s += GAP_S
            self._ahead.append((at_s, lambda: self.marks.began("all_reduce")))
            at_s += REDUCE_S
            self._ahead.append((at_s, lambda: self.marks.ended("all_reduce")))
        self._ahead.append((at_s + 0.002, self.marks.step_began))
        self._ahead.append((at_s + 0.005, self.marks.boundary))

    def learn(self) -> None:
        """Enough iterations for windows to be known."""
        self.sleep((LEARNED + 3) * (LAYERS * (GAP_S + REDUCE_S) + 0.005))

    def send(self, nbytes: int) -> WindowUse:
        """A transfer over the line; what became of it."""
        with self.windows.begin(nbytes) as gate:
            left = nbytes
            while left:
                piece = gate.take(left)
                assert 0 < piece <= left
                left -= piece
                self.sleep(piece / LINK)
        return self.told[-1][0]


def test_what_fits_leaves_in_windows_only() -> None:
    """5 MiB need 50 ms of the line, the windows of an iteration have 200."""
    training = Training()
    training.learn()
    training.send(5 * MIB)  # the line's rate is not known to the first
    use = training.send(5 * MIB)
    assert (use.reason, use.nbytes) == ("", 5 * MIB)
    assert use.passed == {"window": 5 * MIB, "overlap": 0, "fence": 0}


def test_what_does_not_fit_leaves_beside_the_traffic_and_within_the_rate() -> None:
    """All of it leaves, the windows' part in windows, the rest no faster than the plan allows."""
    training = Training()
    training.rate = 20.0 * MIB
    training.learn()
    training.send(5 * MIB)
    began_s = training.clock.now_s
    use = training.send(60 * MIB)
    assert use.reason == ""
    assert sum(use.passed.values()) == 60 * MIB
    assert use.passed["window"] > 0.3 * 60 * MIB
    assert use.passed["overlap"] > 0
    beside_s = use.passed["overlap"] / training.rate
    assert training.clock.now_s - began_s > 0.9 * beside_s


def test_before_windows_are_known_everything_leaves_at_once() -> None:
    """The first copies of a run are not held back, and it is said."""
    use = (training := Training()).send(5 * MIB)
    assert "no windows known yet" in use.reason
    assert use.passed["window"] == 0
    assert sum(use.passed.values()) == 5 * MIB
    assert training.clock.now_s - 100.0 < 0.2


@pytest.mark.parametrize("way", ["stands still", "ends its marks", "another order"])
def test_a_training_that_is_not_heard_any_more_holds_nothing_back(way: str) -> None:
    """In the middle of a transfer: the rest leaves, and the reason is told."""
    training = Training()
    training.learn()
    training.send(5 * MIB)
    with training.windows.begin(40 * MIB) as gate:
        left = 40 * MIB - gate.take(40 * MIB)
        training.running = False
        training._ahead.clear()
        if way == "ends its marks":
            training.marks.spread(0)
        if way == "another order":
            for _ in range(LEARNED):
                training.marks.boundary()
                training.marks.began("barrier")
            training.marks.boundary()
            training.windows.hear()
        began_s = training.clock.now_s
        while left:
            left -= gate.take(left)
            training.sleep(0.0)
    use = training.told[-1][0]
    assert use.reason
    assert sum(use.passed.values()) == 40 * MIB
    assert training.clock.now_s - began_s < 5.0


def test_transfers_at_one_time_share_the_windows_and_are_told_together() -> None:
    """A node sends for several ranks, or to several nodes."""
    training = Training()
    training.learn()
    training.send(5 * MIB)
    told = len(training.told)
    with training.windows.begin(3 * MIB) as one, training.windows.begin(2 * MIB) as other:
        assert one is other
        left = 5 * MIB
        while left:
            piece = one.take(left)
            left -= piece
            training.sleep(piece / LINK)
    assert len(training.told) == told + 1
    assert training.told[-1][0].nbytes == 5 * MIB
    assert training.told[-1][0].share == 1.0


def test_windows_are_those_of_the_trainer_that_says_so() -> None:
    """A new process has another page; one that says nothing has no windows."""
    found = NodeWindows(lambda: 0.0, lambda use, seconds: None)
    memory = RankMemory(rank=0, board=Arena.anonymous(BOARD_BYTES))
    assert found.of(memory) is None
    assert memory.board is not None
    MarkWriter(memory.board.view).spread(3)
    first = found.of(memory)
    assert first is not None
    assert found.of(memory) is first
    memory.board = Arena.anonymous(BOARD_BYTES)
    assert found.of(memory) is None
    memory.board.view[:64].cast("Q")[CELL_SPREAD] = 1
    second = found.of(memory)
    assert second is not None
    assert second is not first
    assert found.of(None) is None


def test_marks_are_heard_on_a_thread_of_its_own() -> None:
    """By the clock of the machine; the windows are known after some iterations."""
    board = Arena.anonymous(BOARD_BYTES)
    marks = MarkWriter(board.view)
    marks.spread(1)
    told: list[WindowUse] = []
    windows = LinkWindows(board.view, lambda: 0.0, lambda use, seconds: told.append(use))
    windows.listen()
    deadline = time.monotonic() + 20.0
    reason = "not asked"
    while reason and time.monotonic() < deadline:
        for _ in range(LEARNED + 1):
            marks.boundary()
            time.sleep(0.05)
            marks.began("all_reduce")
            marks.ended("all_reduce")
            marks.step_began()
        marks.boundary()
        time.sleep(0.03)
        with windows.begin(1) as gate:
            assert gate.take(1) == 1
        reason = told[-1].reason
    windows.close()
    assert reason == ""
