"""Gate: it delays bytes, in turn, and never for longer than it says."""

import threading
from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autockpt.executors.throttle.rate_limit import Throttle

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
REQUESTS = st.lists(st.integers(0, 2**40), max_size=30)


class FakeClock:
    """Seconds that pass only in `sleep`; safe in threads."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []
        self._lock = threading.Lock()

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.slept.append(seconds)
            self.now_s += seconds


class GateContract:
    """Subclass and give `make`: a gate that uses the clock it is handed."""

    make: ClassVar[Callable[[FakeClock], Throttle]]

    @QUICK
    @given(requests=REQUESTS)
    def test_no_wait_is_longer_than_the_gate_says(self, requests: list[int]) -> None:
        """Whatever was asked before, terabytes too."""
        clock = FakeClock()
        gate = self.make(clock)
        for nbytes in requests:
            before = clock.now_s
            blocked = gate.wait(nbytes)
            assert 0 <= blocked <= gate.longest_wait_s
            assert clock.now_s - before == pytest.approx(blocked)

    @QUICK
    @given(requests=REQUESTS, more=st.integers(0, 2**40), at=st.integers(0, 29))
    def test_more_bytes_never_open_it_earlier(
        self, requests: list[int], more: int, at: int
    ) -> None:
        """The same requests with one of them larger end no earlier."""
        larger = [n + (more if i == at else 0) for i, n in enumerate(requests)]
        ends = []
        for asked in (requests, larger):
            clock = FakeClock()
            gate = self.make(clock)
            for nbytes in asked:
                gate.wait(nbytes)
            ends.append(clock.now_s)
        assert ends[1] >= ends[0] - 1e-9 * max(1.0, ends[0])

    def test_no_bytes_cost_nothing(self) -> None:
        """Even behind a queue."""
        clock = FakeClock()
        gate = self.make(clock)
        gate.wait(2**40)
        slept = list(clock.slept)
        assert gate.wait(0) == 0.0
        assert clock.slept == slept

    def test_threads_share_it_without_losing_bytes(self) -> None:
        """As much time passes in total as for one thread that asks for everything."""
        alone, shared = FakeClock(), FakeClock()
        gate = self.make(alone)
        for _ in range(80):
            gate.wait(1000)
        gate = self.make(shared)
        frozen = shared.now_s
        blocked: list[float] = []

        def work() -> None:
            for _ in range(10):
                blocked.append(gate.wait(1000))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(blocked) == 80
        assert max(blocked) <= gate.longest_wait_s
        assert frozen == 0.0
        assert sum(blocked) >= alone.now_s - 1e-9
