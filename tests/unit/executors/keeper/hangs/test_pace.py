"""Stuck is only who stands still for longer than this training's own gaps say."""

import dataclasses
import random

import pytest

from autockpt.executors.keeper.hangs.activity import Activity
from autockpt.executors.keeper.hangs.pace import (
    BUSY_S,
    LATE_S,
    LEAST_S,
    UNKNOWN_S,
    Doing,
    Mark,
    Pace,
    Stillness,
)

TICK_S = 0.5


class Node:
    """Ranks that mark what they do, and a keeper that looks twice a second."""

    def __init__(self, ranks: int = 2) -> None:
        self.pace = Pace()
        self.now_s = 1000.0
        self.marks = {
            rank: Mark(pid=rank, count=1, at_s=self.now_s, doing="begins") for rank in range(ranks)
        }
        self.busy: dict[int, Activity] = {}
        self.found: list[tuple[float, Stillness]] = []

    def mark(self, rank: int, doing: Doing) -> None:
        """The rank makes progress."""
        before = self.marks[rank]
        self.marks[rank] = dataclasses.replace(
            before, count=before.count + 1, at_s=self.now_s, doing=doing
        )

    def all(self, doing: Doing) -> None:
        """All ranks do."""
        for rank in self.marks:
            self.mark(rank, doing)

    def wait(self, seconds: float) -> None:
        """Time passes, and the keeper looks."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + TICK_S)
            still = self.pace.look(self.now_s, self.marks, self.busy)
            if still is not None:
                self.found.append((self.now_s, still))

    def train(self, steps: int, step_s: float = 1.0) -> None:
        """Iterations of one mark."""
        for _ in range(steps):
            self.wait(step_s)
            self.all("trains")


@pytest.mark.parametrize("step_s", [0.05, 1.0, 4.0])
def test_a_rank_that_stands_still_is_noticed_after_five_gaps(step_s: float) -> None:
    """And never before `LEAST_S`; it is told once."""
    node = Node()
    node.train(50, step_s)
    since_s = node.now_s
    node.wait(400.0)
    [(at_s, still)] = node.found
    allowed_s = max(LEAST_S, 5 * step_s)
    assert still.since_s == since_s
    assert allowed_s < at_s - since_s <= allowed_s + 5 * TICK_S + step_s
    assert still.learned


def test_it_is_told_again_after_progress() -> None:
    """Another hang is another incident."""
    node = Node()
    node.train(50)
    node.wait(60.0)
    node.train(10)
    node.wait(200.0)
    assert len(node.found) == 2


def test_an_hour_of_evaluations_saves_and_stalls_raises_no_alarm() -> None:
    """Evaluations ten times as long as a step, saves that hang, a keeper that was stopped."""
    node, chance = Node(4), random.Random(3)
    node.wait(600.0)  # compilation
    while node.now_s < 5200.0:
        node.train(chance.randrange(20, 60), chance.uniform(0.8, 1.2))
        what = chance.randrange(4)
        if what == 0:  # rank 0 evaluates, the others wait for it
            for _ in range(3):
                node.mark(0, "evaluates")
                node.wait(10.0)
        elif what == 1:
            node.mark(1, "saves")
            node.wait(120.0)
        elif what == 2:  # the keeper stands still
            node.now_s += 90.0
        else:  # the script computes, without a call of its model
            node.busy = dict.fromkeys(node.marks, "computes")
            node.wait(100.0)
            node.busy = {}
    assert node.found == []


def test_before_its_gaps_are_known_a_training_has_more_time() -> None:
    """The first iteration compiles, and the first evaluation loads its data."""
    node = Node()
    node.wait(UNKNOWN_S["begins"] - 1.0)
    assert not node.found
    node.wait(10.0)
    assert [still.learned for _, still in node.found] == [False]


def test_a_time_in_which_nobody_looked_is_no_usual_gap() -> None:
    """The machine or the job was suspended; a hang later is noticed as soon as before."""
    node = Node()
    node.train(50)
    node.now_s += 100.0
    node.train(50)
    since_s = node.now_s
    node.wait(60.0)
    [(at_s, still)] = node.found
    assert still.since_s == since_s
    assert at_s - since_s <= LEAST_S + 5 * TICK_S


def test_a_restart_begins_anew() -> None:
    """Marks of the process before say nothing of the new one."""
    node = Node()
    node.train(50)
    node.wait(5.0)
    node.marks[0] = Mark(pid=77, count=1, at_s=node.now_s, doing="begins")
    node.wait(UNKNOWN_S["begins"] - 5.0)
    assert not node.found


@pytest.mark.parametrize("activity", ["computes", "moves data"])
def test_a_rank_that_does_something_has_more_time(activity: Activity) -> None:
    """But not for ever."""
    node = Node(1)
    node.train(50)
    node.busy = {0: activity}
    node.wait(BUSY_S - 5.0)
    assert not node.found
    node.wait(30.0)
    assert [still.is_late for _, still in node.found] == [False]


def test_a_rank_that_computes_while_another_one_waits_is_late_first() -> None:
    """It may poll.  Each is told once."""
    node = Node()
    node.train(50)
    node.busy = {1: "computes"}
    node.wait(LATE_S - 2.0)
    assert not node.found
    node.wait(LATE_S)
    node.busy = {}
    node.wait(1.0)
    node.busy = {1: "computes"}
    node.wait(10.0)
    assert [still.is_late for _, still in node.found] == [True, False]
    node.wait(400.0)
    assert len(node.found) == 2


def test_a_rank_that_moves_data_while_another_one_waits_is_not_late() -> None:
    """It will end by itself."""
    node = Node()
    node.train(50)
    node.busy = {1: "moves data"}
    node.wait(BUSY_S - 5.0)
    assert not node.found


def test_a_rank_that_is_over_is_not_waited_for() -> None:
    """The session of one has ended; the other is stuck all the same."""
    node = Node()
    node.train(50)
    node.mark(0, "over")
    node.wait(20.0)
    assert len(node.found) == 1
    node.mark(1, "over")
    node.wait(500.0)
    assert len(node.found) == 1
