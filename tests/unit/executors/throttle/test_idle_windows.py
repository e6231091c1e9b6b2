"""The window gate keeps the gate contract in every state; bytes move while nothing computes."""

import sys
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot import copy_engine
from autockpt.executors.snapshot.copy_engine import CopyJob, run_jobs
from autockpt.executors.throttle.idle_windows import (
    CHUNKS,
    MEMORY_KEPT,
    IdleWindowThrottle,
    WindowUse,
)
from autockpt.executors.throttle.rate_limit import Throttle
from autockpt.executors.throttle.window_forecast import LEARNED, MEMORY, IdleWindowForecast
from autockpt.values.pipeline import order_digest
from tests.contracts.gate_contract import FakeClock, GateContract

MIB = 2**20
RATE = 1e9
COMPUTE_S = 0.1


def gate_on(clock: FakeClock, longest_wait_s: float = 0.5) -> IdleWindowThrottle:
    """A gate whose mover makes 1 GB/s."""
    return IdleWindowThrottle(
        bytes_per_s=RATE, longest_wait_s=longest_wait_s, now_s=clock.now, sleep=clock.sleep
    )


def iteration(
    gate: IdleWindowThrottle, clock: FakeClock, gaps_s: list[float], names: str = "F"
) -> None:
    """One iteration: a gap, a chunk of compute, a gap, ... and the optimizer's step."""
    gate.boundary()
    for number, gap_s in enumerate(gaps_s):
        clock.now_s += gap_s
        if number + 1 < len(gaps_s):
            what = f"0{names}{number}"
            gate.began(what)
            clock.now_s += COMPUTE_S
            gate.ended(what)
    gate.step_began()
    clock.now_s += 0.01


def learned(
    clock: FakeClock, gaps_s: list[float], longest_wait_s: float = 0.5
) -> IdleWindowThrottle:
    """A gate that knows these windows, at a boundary: window 0 has just opened."""
    gate = gate_on(clock, longest_wait_s)
    for _ in range(LEARNED + 1):
        iteration(gate, clock, gaps_s)
    gate.boundary()
    return gate


def in_window(clock: FakeClock) -> Throttle:
    """A window of 0.4 s is open, one of 0.2 s is ahead."""
    gate = learned(clock, [0.4, 0.2, 0.0])
    clock.now_s, clock.slept = 0.0, []
    gate._forecast.boundary(0.0)
    gate.begin(400 * MIB)
    return gate


def in_compute(clock: FakeClock) -> Throttle:
    """The next window is ahead, and nobody will say that it opened."""
    gate = learned(clock, [0.0, 0.4, 0.0])
    clock.now_s, clock.slept = 0.0, []
    gate._forecast.boundary(0.0)
    gate.began("0F0")
    gate.begin(100 * MIB)
    return gate


class TestFresh(GateContract):
    """Nothing known yet: everything passes."""

    make = staticmethod(gate_on)


class TestInWindow(GateContract):
    """Chunks that fit pass at once."""

    make = staticmethod(in_window)


class TestInCompute(GateContract):
    """Chunks wait for a window that never comes, as long as the contract allows."""

    make = staticmethod(in_compute)


@pytest.mark.parametrize(
    ("nbytes", "how"), [(CHUNKS[0], "window"), (450 * MIB, "overlap")], ids=["fits", "fits nowhere"]
)
def test_a_window_that_is_too_short_wakes_nobody(nbytes: int, how: str) -> None:
    """Each waking takes the interpreter's lock from the training; the long window does wake."""
    clock = FakeClock()
    gate = learned(clock, [0.0, 0.001, 0.4, 0.0], longest_wait_s=30.0)
    gate.begin(100 * MIB)
    asleep, woken = threading.Event(), threading.Semaphore(0)

    def sleep(seconds: float) -> None:
        asleep.set()
        gate._changed.wait(seconds)
        woken.release()

    gate._sleep = sleep
    gate.began("0F0")
    mover = threading.Thread(target=lambda: gate.wait(nbytes), daemon=True)
    mover.start()
    assert asleep.wait(10.0)
    gate.ended("0F0")
    assert not woken.acquire(timeout=0.1)
    clock.now_s += 0.001
    gate.began("0F1")
    gate.ended("0F1")
    mover.join(10.0)
    assert not mover.is_alive()
    assert gate.use.passed == {"window": 0, "overlap": 0, "fence": 0} | {how: nbytes}


class Mover:
    """Copies in chunks on a thread while a script of marks moves the clock by events.

    Steps deterministic: the gate's `sleep` lets the script go on to its next mark.
    """

    def __init__(self, clock: FakeClock, gate: IdleWindowThrottle, script: Iterator[float]) -> None:
        self.clock, self.gate, self.script = clock, gate, script
        self.next_s = next(script)
        gate._sleep = self.until_mark

    def until_mark(self, seconds: float) -> None:
        """Sleeps to the next mark or the deadline, whichever comes first."""
        self._advance(min(self.clock.now_s + seconds, self.next_s))

    def _advance(self, to_s: float) -> None:
        while self.next_s <= to_s:
            self.clock.now_s = max(self.clock.now_s, self.next_s)
            self.next_s = next(self.script)
        self.clock.now_s = max(self.clock.now_s, to_s)

    def move(self, nbytes: int, rate: float = RATE) -> WindowUse:
        """The whole transfer."""
        use = self.gate.begin(nbytes)
        done = 0
        while done < nbytes:
            count = min(use.chunk_bytes, nbytes - done)
            self.gate.wait(count)
            self._advance(self.clock.now_s + count / rate)
            done += count
        return use


def marks(clock: FakeClock, gate: IdleWindowThrottle, gaps_s: list[float]) -> Iterator[float]:
    """Times of the coming marks of one iteration; each mark is made when the next is asked for."""
    at_s = clock.now_s
    for number, gap_s in enumerate(gaps_s):
        at_s += gap_s
        yield at_s
        if number + 1 == len(gaps_s):
            gate.hurry()
            break
        gate.began(f"0F{number}")
        at_s += COMPUTE_S
        yield at_s
        gate.ended(f"0F{number}")
    yield float("inf")


def moved(known_s: list[float], now_s: list[float], nbytes: int, rate: float = RATE) -> WindowUse:
    """A transfer in an iteration with windows `now_s` by a gate that knows `known_s`."""
    clock = FakeClock()
    gate = learned(clock, known_s, longest_wait_s=10.0)
    return Mover(clock, gate, marks(clock, gate, now_s)).move(nbytes, rate)


def test_bytes_that_fit_move_inside_windows() -> None:
    """200 MB at 1 GB/s into windows of 0.15 s each."""
    use = moved([0.15, 0.15, 0.15, 0.0], [0.15, 0.15, 0.15, 0.0], 200 * MIB)
    assert use.reason == ""
    assert use.share == 1.0


def test_what_does_not_fit_is_spread_beside_the_compute() -> None:
    """Twice as many bytes as the windows take: the rest overlaps, little is left for the fence."""
    use = moved([0.1, 0.1, 0.1, 0.0], [0.1, 0.1, 0.1, 0.0], 400 * MIB)
    assert use.passed["overlap"] > 0.3 * use.nbytes
    assert use.passed["window"] > 0.4 * 0.3 * RATE
    assert use.passed["fence"] < 0.15 * use.nbytes


class LateMover(Mover):
    """Wakes 0.2 s after the mark that woke it: the training's thread has the core first."""

    def until_mark(self, seconds: float) -> None:
        """Sleeps on when it was not the deadline."""
        woken = self.next_s <= self.clock.now_s + seconds
        super().until_mark(seconds)
        if woken:
            self._advance(self.clock.now_s + 0.2)


def test_windows_that_take_less_than_they_promise_are_believed_less() -> None:
    """A window of 0.4 s, but who waits for it comes late.  One transfer finds out at its fence;
    the following ones overlap in time, and the window still takes what it can."""
    clock, gaps_s = FakeClock(), [0.05, 0.05, 0.4]
    gate = learned(clock, gaps_s, longest_wait_s=10.0)
    uses = []
    for _ in range(5):
        mover = LateMover(clock, gate, marks(clock, gate, gaps_s))
        uses.append(mover.move(300 * MIB))
        mover._advance(clock.now_s + 10.0)
        gate.step_began()
        gate.boundary()
    assert uses[1].passed["fence"] > 0.2 * uses[1].nbytes  # the first measured the pace
    for use in uses[2:]:
        assert use.reason == ""
        assert use.passed["fence"] < 0.05 * use.nbytes
        assert use.passed["window"] > 0.4 * use.nbytes


def test_windows_that_took_nothing_are_left_alone_for_some_transfers() -> None:
    """Then they are tried again: whatever held the mover back may be gone."""
    clock = FakeClock()
    gate = learned(clock, [0.2, 0.2, 0.0])
    gate._remember(0.02)
    reasons = [gate.begin(100 * MIB).reason for _ in range(MEMORY_KEPT)]
    assert all("took 2% of what they promised lately" in reason for reason in reasons[:-1])
    assert "windows take 6" in reasons[0]
    assert reasons[-1] == ""


def test_what_overlaps_is_through_before_the_optimizer_steps() -> None:
    """Its step is half of the iteration: the fence is before it, and the pace must make that."""
    clock, gaps_s = FakeClock(), [0.1, 0.1, 0.0]
    gate = gate_on(clock, longest_wait_s=10.0)
    for _ in range(LEARNED + 1):
        iteration(gate, clock, gaps_s)
        clock.now_s += 0.4
    gate.boundary()
    use = Mover(clock, gate, marks(clock, gate, gaps_s)).move(250 * MIB)
    assert use.passed["overlap"] > 0
    assert use.passed["fence"] < 0.05 * use.nbytes


def test_little_is_left_for_the_fence_of_a_faster_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a sixth, which is within the margin of the pace; twice as much without one."""
    clock, gaps_s = FakeClock(), [0.02, 0.02, 0.02, 0.02, 0.0]
    gate = learned(clock, gaps_s, longest_wait_s=10.0)
    monkeypatch.setattr(sys.modules[__name__], "COMPUTE_S", COMPUTE_S * 5 / 6)
    use = Mover(clock, gate, marks(clock, gate, gaps_s)).move(120 * MIB)
    assert use.passed["overlap"] > 0
    assert use.passed["fence"] < 0.04 * use.nbytes


def test_windows_that_vanish_fall_back_to_plain_overlap() -> None:
    """A zero-bubble schedule: nothing is held back, and the reason says why."""
    use = moved([0.0001, 0.0001, 0.0001, 0.0], [0.0001, 0.0001, 0.0001, 0.0], 200 * MIB)
    assert use.passed == {"window": 0, "overlap": 200 * MIB, "fence": 0}
    assert use.blocked_s == 0.0
    assert "windows take 0 of" in use.reason
    assert "0.10 ms" in use.reason


def test_a_chunk_bigger_than_every_window_begins_with_the_longest() -> None:
    """It cannot be hidden, only begun as early as any window; it is counted as overlap."""
    clock = FakeClock()
    gate = learned(clock, [0.02, 0.03, 0.02, 0.0], longest_wait_s=10.0)
    Mover(clock, gate, marks(clock, gate, [0.02, 0.03, 0.02, 0.0]))
    began_s = clock.now_s
    gate.begin(30 * MIB)
    gate.wait(30 * MIB)
    assert clock.now_s - began_s == pytest.approx(0.02 + COMPUTE_S)
    assert gate.use.passed == {"window": 0, "overlap": 30 * MIB, "fence": 0}


def test_chunks_are_as_large_as_short_windows_allow() -> None:
    """Windows of 3 ms at 1 GB/s take no chunk of 4 MiB, and many of 256 KiB."""
    clock = FakeClock()
    short = learned(clock, [0.003] * 20 + [0.0])
    long = learned(FakeClock(), [0.3, 0.3, 0.0])
    assert short.begin(20 * MIB).chunk_bytes < 4 * MIB
    assert long.begin(20 * MIB).chunk_bytes == CHUNKS[0]


def test_short_gaps_are_left_alone_while_the_longest_windows_take_all() -> None:
    """In a short one the training posts and prepares: who wakes there disturbs it."""
    use = moved([0.03, 0.5, 0.03, 0.0], [0.03, 0.5, 0.03, 0.0], 200 * MIB)
    assert use.share == 1.0
    began_s = [move.began_s for move in use.moves]
    assert max(after - before for before, after in pairwise(began_s)) < COMPUTE_S / 2


def test_short_gaps_take_what_the_longest_window_did_not() -> None:
    """It closes after a tenth of its time: the rest moves in the others, before the fence."""
    short_s = [0.04] * 10
    use = moved([0.5, *short_s, 0.0], [0.05, *short_s, 0.0], 200 * MIB)
    assert use.reason == ""
    assert use.passed["fence"] == 0
    assert use.passed["window"] > 1.5 * 0.05 * RATE
    assert len({round(move.began_s / COMPUTE_S) for move in use.moves}) > 4


def test_of_the_longest_window_alone_is_told_what_it_kept() -> None:
    """It took 40 of some 400 MB before it closed: what the short ones took after it is not its."""
    clock, gaps_s = FakeClock(), [0.5, *[0.04] * 10, 0.0]
    gate = learned(clock, gaps_s, longest_wait_s=10.0)
    gate._rates.append(RATE)
    Mover(clock, gate, marks(clock, gate, [0.05, *gaps_s[1:]])).move(200 * MIB)
    assert [*gate._kept] == [pytest.approx(0.1, abs=0.03)]


def test_the_longest_windows_are_as_many_as_needed() -> None:
    """Two of three for twice the bytes; spread over two iterations one is enough again."""
    clock = FakeClock()
    gate = learned(clock, [0.1, 0.3, 0.2, 0.0])
    for nbytes, iterations, in_use in (
        (180, 1, 1),
        (280, 1, 2),
        (330, 1, 3),
        (280, 2, 1),
        (600, 1, 3),
    ):
        gate.begin(nbytes * 10**6, iterations=iterations)
        assert sum(w > 0 for w in gate._forecast.forecasts_s) == in_use, nbytes


def test_an_evaluation_has_no_windows() -> None:
    """Its chunks are others: the gaps of this iteration are unknown until the next one."""
    clock = FakeClock()
    gate = learned(clock, [0.1, 0.1, 0.0])
    assert gate._forecast.left_s(clock.now_s) == pytest.approx(0.1)
    gate.began("0E0")
    gate.ended("0E0")
    assert gate._forecast.left_s(clock.now_s) == 0.0
    gate.boundary()
    assert gate._forecast.left_s(clock.now_s) == pytest.approx(0.1)


def test_between_chunks_without_news_nothing_is_worked_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The training thread is what asks there, on its way to the next chunk."""
    clock = FakeClock()
    gate = learned(clock, [0.0, 1e-4, 1e-4, 0.4, 0.0], longest_wait_s=30.0)
    gate.begin(100 * MIB)
    gate._waiting.append(4 * MIB)
    asked: list[float] = []
    monkeypatch.setattr(gate, "_in_window", lambda nbytes, now_s: asked.append(now_s))
    for name, news in (("0F0", 0), ("0F1", 0), ("0F2", 1)):
        gate.began(name)
        gate.ended(name)
        assert len(asked) == news
        clock.now_s += 1e-4


def test_a_window_that_closes_early_stops_the_copy() -> None:
    """Half as long as it used to be: what was begun ends, and no chunk follows beside compute."""
    use = moved([0.2, 0.4, 0.0], [0.1, 0.4, 0.0], 200 * MIB)
    inside = [move for move in use.moves if move.how == "window"]
    assert use.passed["fence"] == 0
    assert use.passed["window"] > 0.9 * use.nbytes
    assert len(inside) > 10


def test_windows_that_move_are_felt_within_two_iterations() -> None:
    """The order is the same, the lengths are swapped: the forecast follows the shorter ones."""
    clock = FakeClock()
    gate = learned(clock, [0.3, 0.1, 0.0])
    for _ in range(2):
        iteration(gate, clock, [0.1, 0.3, 0.0])
    assert gate._forecast.forecasts_s[0] == pytest.approx(0.1)
    assert gate._forecast.forecasts_s[1] == pytest.approx(0.1)
    for _ in range(MEMORY):
        iteration(gate, clock, [0.1, 0.3, 0.0])
    assert gate._forecast.forecasts_s[1] == pytest.approx(0.3)


def test_a_straggler_makes_windows_longer_and_nothing_breaks() -> None:
    """A rank that waits 0.3 s longer for a slow neighbour still moves everything in windows."""
    use = moved([0.1, 0.1, 0.1, 0.0], [0.4, 0.1, 0.4, 0.0], 150 * MIB)
    assert use.share > 0.9


def test_a_slow_mover_is_measured_and_takes_fewer_bytes() -> None:
    """Copies at a quarter of the pace that was known: chunks still end within their windows."""
    clock = FakeClock()
    gate = learned(clock, [0.2, 0.2, 0.2, 0.0], longest_wait_s=10.0)
    mover = Mover(clock, gate, marks(clock, gate, [0.2, 0.2, 0.2, 0.0]))
    mover.move(60 * MIB, RATE / 4)
    assert gate._takes_s(4 * MIB) == pytest.approx(4 * MIB / (RATE / 4), rel=0.2)


def test_a_small_piece_sets_no_pace() -> None:
    """The first tensor of a rank has 16 KiB, whose copy is all start: windows would take nothing
    at its pace, and would be off for good."""
    clock, gaps_s = FakeClock(), [0.15, 0.15, 0.15, 0.0]
    gate = learned(clock, gaps_s, longest_wait_s=10.0)
    gate.begin(200 * MIB)
    for _ in range(MEMORY):
        gate.wait(2**14)
        clock.now_s += 0.002
        gate.moved()
    assert gate._takes_s(4 * MIB) == pytest.approx(4 * MIB / RATE, rel=0.1)
    gate.boundary()
    assert gate.begin(200 * MIB).reason == ""


def test_windows_that_come_back_are_used_at_the_pace_of_copies_alone() -> None:
    """While they were gone copies went beside the compute, at an eighth of it: by that pace these
    windows would take too little for ever."""
    clock, gaps_s, vanished_s = FakeClock(), [0.03, 0.03, 0.03, 0.0], [0.0001] * 3 + [0.0]
    gate = learned(clock, gaps_s, longest_wait_s=10.0)
    Mover(clock, gate, marks(clock, gate, gaps_s)).move(200 * MIB)
    for _ in range(MEMORY):
        iteration(gate, clock, vanished_s)
    gate.boundary()
    use = Mover(clock, gate, marks(clock, gate, vanished_s)).move(200 * MIB, RATE / 8)
    assert use.passed == {"window": 0, "overlap": 200 * MIB, "fence": 0}
    for _ in range(MEMORY):
        iteration(gate, clock, gaps_s)
    gate.boundary()
    assert gate.begin(200 * MIB).reason == ""


def test_windows_of_another_schedule_are_refused_by_their_fingerprint() -> None:
    """Handed in for backward-first, met by forward-only: said, dropped, measured anew."""
    clock = FakeClock()
    gate = gate_on(clock)
    gate.hand_in({0: 0.5, 1: 0.5}, order_digest(["0B0", "0F0"]))
    assert gate.begin(10 * MIB).reason == ""
    for _ in range(2):
        iteration(gate, clock, [0.1, 0.1, 0.0])
    gate.boundary()
    assert "do not fit" in gate.refused
    assert gate.begin(10 * MIB).reason.startswith("no windows known yet")


def test_windows_of_the_same_schedule_are_used_from_the_first_iteration() -> None:
    """The profile saved the iterations of learning."""
    clock = FakeClock()
    gate = gate_on(clock)
    gate.hand_in({0: 0.1, 1: 0.1}, order_digest(["0F0", "0F1"]))
    assert gate.begin(10 * MIB).reason == ""
    for _ in range(2):
        iteration(gate, clock, [0.1, 0.1, 0.0])
    gate.boundary()
    assert gate.refused == ""
    assert gate.begin(10 * MIB).reason == ""


def test_another_order_is_learned_anew_and_an_evaluation_is_not_an_order() -> None:
    """One odd iteration changes nothing; three in a row are a new schedule."""
    clock = FakeClock()
    gate = learned(clock, [0.1, 0.1, 0.0])
    iteration(gate, clock, [0.0, 0.0, 0.0], names="B")
    iteration(gate, clock, [0.1, 0.1, 0.0])
    assert gate._forecast.forecasts_s[0] == pytest.approx(0.1)
    for _ in range(2 * LEARNED):
        iteration(gate, clock, [0.2, 0.05, 0.0], names="B")
    gate.boundary()
    assert gate._forecast.relearned == 1
    assert gate._forecast.forecasts_s[0] == pytest.approx(0.2)


def test_the_fence_opens_it_while_somebody_waits() -> None:
    """A thread inside `wait` goes on within milliseconds of `hurry`, not at its deadline."""
    gate = IdleWindowThrottle(bytes_per_s=RATE, longest_wait_s=30.0)
    for _ in range(LEARNED + 2):
        gate.boundary()
        gate.began("0F0")
        gate.ended("0F0")
        threading.Event().wait(0.02)
        gate.step_began()
    gate.boundary()
    gate.began("0F0")
    gate.begin(MIB)
    blocked: list[float] = []
    thread = threading.Thread(target=lambda: blocked.append(gate.wait(MIB)))
    thread.start()
    threading.Event().wait(0.05)
    assert not blocked
    gate.hurry()
    thread.join(timeout=5)
    assert blocked
    assert blocked[0] < 5
    assert gate.use.passed["fence"] == MIB


def test_the_training_has_its_core_first_until_somebody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has results to post when a window opens; at the fence it is the one that waits."""
    clock, yields = FakeClock(), []
    gate = learned(clock, [0.1, 0.1, 0.0])
    monkeypatch.setattr(copy_engine, "give_way", lambda: yields.append(gate.use.passed["window"]))
    source, target = Arena.anonymous(8 * MIB), Arena.anonymous(8 * MIB)
    jobs = [CopyJob(8 * MIB, target.address, source.address, 8 * MIB)]
    gate.begin(8 * MIB)
    piece = gate.use.chunk_bytes
    run_jobs(jobs, None, gate=gate)
    assert yields == [*range(piece, 8 * MIB + 1, piece)]
    gate.begin(8 * MIB)
    gate.hurry()
    run_jobs(jobs, None, gate=gate)
    assert gate.use.passed["fence"] == 8 * MIB
    assert len(yields) == 8 * MIB // piece


def test_a_transfer_may_take_several_iterations() -> None:
    """Over three iterations it waits for the windows of the next ones instead of overlapping."""
    clock = FakeClock()
    gate = learned(clock, [0.1, 0.1, 0.0], longest_wait_s=0.01)
    gate.began("0F0")
    gate.begin(300 * MIB)
    assert gate.wait(4 * MIB) == 0.0
    gate.begin(300 * MIB, iterations=3)
    clock.now_s += 0.1
    assert gate.wait(4 * MIB) == pytest.approx(0.01)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["began", "ended", "step", "boundary"]), st.floats(0.0, 1.0)),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(events=EVENTS)
def test_marks_in_any_order_never_break_the_forecast(events: list[tuple[str, float]]) -> None:
    """Exceptions in a chunk, evaluations, skipped steps: forecasts stay finite and positive."""
    forecast, now_s = IdleWindowForecast(), 0.0
    for what, after_s in events:
        now_s += after_s
        match what:
            case "began":
                forecast.began("0F0", now_s)
            case "ended":
                forecast.ended(now_s)
            case "step":
                forecast.step_began(now_s)
            case _:
                forecast.boundary(now_s)
        assert 0 <= forecast.left_s(now_s) <= now_s + 1
        assert all(0 <= length_s <= now_s for length_s in forecast.forecasts_s)
