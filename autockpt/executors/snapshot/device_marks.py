"""Where a device is in its iteration: marks of the training thread, told when it gets there.

The training thread issues work ahead of its device, so when it enters a chunk says nothing of when
the device idles.  A mark is an event of the training stream.  A thread waits for the events in
their order and then tells the gate, some ten microseconds late.  The training thread waits for
nothing.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from autockpt.executors.throttle.idle_windows import IdleWindowThrottle


class Marker(Protocol):
    """The training stream of a device (`device.DeviceCopier`)."""

    def mark(self) -> Any:
        """An event as of now; its `synchronize()` waits for the device."""


class DeviceMarks:
    """Send `gate` the calls of an `IdleWindowThrottle`; used from the training thread."""

    def __init__(self, gate: IdleWindowThrottle, device: Marker) -> None:
        self._gate, self._device = gate, device
        self.error: Exception | None = None
        """The reason why marks have stopped: then everything passes the gate."""
        self._marks: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="autockpt-marks", daemon=True)
        self._thread.start()

    def began(self, what: str) -> None:
        """A chunk was issued from here on."""
        self._mark(lambda: self._gate.began(what))

    def ended(self, what: str) -> None:
        """All of it was issued."""
        self._mark(lambda: self._gate.ended(what))

    def step_began(self) -> None:
        """The optimizer's step is issued from here on."""
        self._mark(self._gate.step_began)

    def boundary(self) -> None:
        """All of it was issued."""
        self._mark(self._gate.boundary)

    def close(self) -> None:
        """Ends the thread, once the device has come to the last mark; waits for nothing."""
        self._marks.put(None)

    def _mark(self, tell: Callable[[], None]) -> None:
        if self.error is None:
            self._marks.put((self._device.mark(), tell))

    def _follow(self) -> None:
        try:
            while (mark := self._marks.get()) is not None:
                event, tell = mark
                event.synchronize()
                tell()
        except Exception as error:  # the device's: the training will say what it was
            self.error = error
            self._gate.hurry()
