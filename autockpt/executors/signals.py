"""Signals when the training thread cannot hear them.

A Python handler does not run while the thread sits in a collective.  `set_wakeup_fd` writes the
signal's number to a socket from C, and a thread of ours reads it within a millisecond: it tells the
keeper, gives the loop a moment to reach a boundary, and leaves.  A survivor that stays would hold
torchelastic's restart for 30 seconds (measured).

The number does not say which process was meant, and a forked child inherits socket and handler: it
gives both up before a signal can reach it.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

GRACE_S = 1.5
"""How long the loop may take to reach a boundary after SIGTERM."""
_OVER = b"\0"
"""No number of a signal: ends the thread."""


class TerminationWatch:
    """Watches SIGTERM while the script has no handler of its own for it."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self.requested = 0
        """Number of the signal that asked us to leave, 0 before."""
        self._stopped = threading.Event()
        self._handler: Callable[..., None] | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return  # the script looks after it
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._former = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handler = lambda *_: None
        signal.signal(signal.SIGTERM, self._handler)
        self._masks = threading.local()
        os.register_at_fork(
            before=self._hold, after_in_parent=self._let_through, after_in_child=self._give_up
        )
        threading.Thread(target=self._watch, name="autockpt-signals", daemon=True).start()

    def stop(self) -> None:
        """The loop reached a boundary and leaves by itself."""
        self._stopped.set()

    def close(self) -> None:
        """Watches nothing more: as if it had never been there."""
        self._stopped.set()
        self._on_signal = lambda number: None
        if self._handler is None or threading.current_thread() is not threading.main_thread():
            return
        self._give_back(self._former)
        self._handler = None
        with contextlib.suppress(OSError):
            self._writer.send(_OVER)

    def _watch(self) -> None:
        while True:
            data = self._reader.recv(16)
            if _OVER in data:
                self._reader.close()
                self._writer.close()
                return
            self._pass_on(data)
            if signal.SIGTERM in data and signal.getsignal(signal.SIGTERM) is self._handler:
                break
        self.requested = int(signal.SIGTERM)
        with contextlib.suppress(Exception):
            self._on_signal(self.requested)
        if not self._stopped.wait(GRACE_S):
            os._exit(128 + self.requested)

    def _hold(self) -> None:
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _let_through(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _give_up(self) -> None:
        """In a forked child: as if we had never been there."""
        self._give_back(-1)
        self._let_through()

    def _give_back(self, descriptor: int) -> None:
        """Puts a wake-up descriptor, and what the system does with the signal, in our place."""
        if self._handler is None:
            return
        in_force = signal.set_wakeup_fd(-1)
        theirs = in_force if in_force != self._writer.fileno() else descriptor
        if theirs >= 0:
            signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _pass_on(self, data: bytes) -> None:
        """Somebody else's wake-up descriptor keeps getting its bytes."""
        if self._former >= 0:
            with contextlib.suppress(OSError):
                os.write(self._former, data)
