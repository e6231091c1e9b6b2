"""The time in which bytes of other nodes are on their way here, pauses of the sender excluded."""

import threading
import time
from collections.abc import Callable


class LinkMeter:
    """Bytes that came, and how long some were coming; for all transfers of a node together."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._coming = 0
        self._since_s = self._moving_s = 0.0
        self._bytes = 0

    def begin(self) -> None:
        """A chunk begins to come: the sender has let it go."""
        with self._lock:
            if not self._coming:
                self._since_s = self._now_s()
            self._coming += 1

    def end(self, nbytes: int) -> None:
        """It is here; 0 bytes: it will not be."""
        with self._lock:
            self._bytes += nbytes
            self._coming -= 1
            if not self._coming:
                self._moving_s += self._now_s() - self._since_s

    def take(self) -> tuple[int, float]:
        """(bytes, seconds) since the last call."""
        with self._lock:
            now_s = self._now_s()
            moving_s = self._moving_s + (now_s - self._since_s if self._coming else 0.0)
            taken = self._bytes, moving_s
            self._bytes, self._moving_s, self._since_s = 0, 0.0, now_s
        return taken
