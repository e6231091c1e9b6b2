"""Throttles: background work asks one before it uses the disk or a core again.

The mover does not know the reason (a rate, a bubble of the iteration, a save under way), and the
throttle does not know files.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from autockpt.values.errors import ConfigError


class Throttle(Protocol):
    """Lets bytes pass, in turn; called from several threads at once.

    `wait(n)` blocks until `n` more bytes may move and returns the seconds it blocked.  It never
    blocks longer than `longest_wait_s`, after any requests: a throttle delays work and cannot
    stop it.  More bytes never open it earlier, zero bytes cost nothing, and it never raises.
    """

    longest_wait_s: float
    """The deadline of one `wait`, seconds; >= 0."""

    def wait(self, nbytes: int) -> float:
        """Blocks until `nbytes` may move; seconds blocked."""


class PieceGate(Protocol):
    """Lets the bytes of a transfer pass in pieces of the size that suits it; one thread a gate."""

    def take(self, left: int) -> int:
        """Blocks until some of `left` > 0 bytes may move; how many, 1..`left`.

        The bytes taken before have reached the other end by then.
        """


class Windows(Protocol):
    """Opens a gate for each transfer that uses the windows of one link."""

    def begin(self, nbytes: int) -> AbstractContextManager[PieceGate]:
        """A transfer of `nbytes`; it ends with the context."""


class Unlimited:
    """Always open: a thread waits for the result."""

    longest_wait_s = 0.0

    def wait(self, nbytes: int) -> float:
        """Returns at once."""
        return 0.0


class RateLimiter:
    """Lets `bytes_per_s` pass, for background work.

    Bytes that passed at once delay the next ones.  The rest of a capped wait is forgotten, so one
    huge request does not slow the work for ever.
    """

    def __init__(
        self,
        bytes_per_s: float,
        *,
        longest_wait_s: float = 1.0,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if not (bytes_per_s > 0 and longest_wait_s >= 0):
            raise ConfigError(
                f"a gate of {bytes_per_s} bytes/s with waits of up to {longest_wait_s} s: "
                "must be above 0 and at least 0"
            )
        self.longest_wait_s = longest_wait_s
        self.bytes_per_s = bytes_per_s
        """May be changed at any time; what passed before is paid for as it was agreed."""
        self._now_s = now_s
        self._sleep = sleep
        self._paid_at_s = now_s()
        """When the bytes let through so far are paid for."""
        self._lock = threading.Lock()

    def wait(self, nbytes: int) -> float:
        """Blocks until the earlier bytes are paid for, at most `longest_wait_s`."""
        if nbytes <= 0:
            return 0.0
        with self._lock:
            now_s = self._now_s()
            blocked_s = min(max(0.0, self._paid_at_s - now_s), self.longest_wait_s)
            self._paid_at_s = now_s + blocked_s + nbytes / self.bytes_per_s
        if blocked_s:
            self._sleep(blocked_s)
        return blocked_s
