"""Both gates keep the gate contract; the paced one keeps its rate."""

import threading

import pytest

from autockpt.executors.throttle.rate_limit import RateLimiter, Throttle, Unlimited
from autockpt.values.errors import ConfigError
from tests.contracts.gate_contract import FakeClock, GateContract


class Meddling(float):
    """A rate during whose first use another thread comes in, if nothing keeps it out."""

    during: threading.Thread | None = None

    def __rtruediv__(self, count: float) -> float:
        thread, Meddling.during = Meddling.during, None
        if thread is not None:
            thread.start()
            thread.join(timeout=0.1)
        return count / float(self)


def open_gate(clock: FakeClock) -> Throttle:
    """Needs no clock."""
    return Unlimited()


def paced_gate(clock: FakeClock) -> Throttle:
    """One megabyte per second."""
    return RateLimiter(1e6, longest_wait_s=0.5, now_s=clock.now, sleep=clock.sleep)


class TestOpen(GateContract):
    """Somebody waits for the result."""

    make = staticmethod(open_gate)


class TestPaced(GateContract):
    """Nobody does."""

    make = staticmethod(paced_gate)

    def test_the_rate_is_kept(self) -> None:
        """100 chunks of 0.1 s each take 9.9 s: the first passes at once."""
        clock = FakeClock()
        gate = paced_gate(clock)
        for _ in range(100):
            gate.wait(100_000)
        assert clock.now_s == pytest.approx(9.9)

    def test_work_slower_than_the_gate_is_not_delayed(self) -> None:
        """The pace is a ceiling, not a tax."""
        clock = FakeClock()
        gate = paced_gate(clock)
        for _ in range(10):
            gate.wait(100_000)
            clock.now_s += 0.2
        assert clock.slept == []

    def test_time_that_nobody_used_is_not_saved_up(self) -> None:
        """After a pause there is no burst."""
        clock = FakeClock()
        gate = paced_gate(clock)
        clock.now_s += 1000
        assert [round(gate.wait(100_000), 6) for _ in range(3)] == [0.0, 0.1, 0.1]

    def test_one_huge_request_does_not_slow_the_work_for_ever(self) -> None:
        """What a capped wait left unpaid is forgotten."""
        clock = FakeClock()
        gate = paced_gate(clock)
        gate.wait(10**12)
        waits = [gate.wait(1000) for _ in range(4)]
        assert waits[0] == 0.5
        assert waits[1:] == pytest.approx([0.001] * 3)

    def test_two_threads_never_pay_for_each_others_bytes(self) -> None:
        """One asks between the other's look at the clock and its turn: they still take turns."""
        clock = FakeClock()
        gate = RateLimiter(Meddling(1e6), now_s=clock.now, sleep=clock.sleep)
        blocked: list[float] = []
        other = threading.Thread(target=lambda: blocked.append(gate.wait(1000)))
        Meddling.during = other
        blocked.append(gate.wait(1000))
        other.join()
        assert sum(blocked) == pytest.approx(0.001)

    @pytest.mark.parametrize(("rate", "longest"), [(0, 1), (-1, 1), (float("nan"), 1), (1, -1)])
    def test_a_gate_that_never_opens_is_refused(self, rate: float, longest: float) -> None:
        """Rates are positive, deadlines are not negative."""
        with pytest.raises(ConfigError, match="must be above 0 and at least 0"):
            RateLimiter(rate, longest_wait_s=longest)
