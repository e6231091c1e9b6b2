"""Times iterations in blocks: with and without background work, stalls apart."""

import time

BLOCK_S = 1.0
"""Iterations are reported in blocks of about this time."""


class IterationClock:
    """Times iterations in blocks: with and without background work, stalls apart."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._stall = 0.0
        self._skip_first = True
        self.newest_s: float | None = None
        """The newest iteration, seconds, without stalls of ours."""
        self._reset()

    def _reset(self) -> None:
        self._count = 0
        self._total = 0.0
        self._stall_total = 0.0
        self._quiet: list[float] = []
        self._busy: list[float] = []

    def boundary(self, background: bool) -> float:
        """An iteration ended; the time now."""
        now = time.monotonic()
        took = now - self._last - self._stall
        if not self._skip_first:
            self._count += 1
            self._total += took
            self.newest_s = took
            (self._busy if background else self._quiet).append(took)
        self._skip_first = False
        self._stall_total += self._stall
        self._stall = 0.0
        self._last = now
        return now

    @property
    def boundary_s(self) -> float:
        """Time of the newest boundary."""
        return self._last

    def stalled(self, seconds: float) -> None:
        """Part of the coming iteration is our doing."""
        self._stall += seconds

    def block(self, *, force: bool) -> tuple[int, float, float, float, float] | None:
        """(count, seconds, stall, mean quiet, mean busy) when a block is full."""
        if not self._count or (self._total + self._stall_total < BLOCK_S and not force):
            return None
        block = (
            self._count, self._total, self._stall_total, _mean(self._quiet), _mean(self._busy),
        )  # fmt: skip
        self._reset()
        return block


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
