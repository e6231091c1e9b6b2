"""Signals when the training thread cannot hear them, and the end of the launcher.

A Python handler does not run while the thread sits in a collective.  `set_wakeup_fd` writes the
signal's number to a socket from C, and a thread of ours reads it within a millisecond.  The same
thread sees the launcher's process end.  A signal for which the script, or a library, has a handler
of its own is theirs alone.

Processes of `torch.multiprocessing.spawn` get SIGINT when their parent ends, which the same signal
to all of them may have ended.  That one asks for an end as well, but is no second demand.

The number does not say which process was meant, and a forked child inherits socket and handlers.
The child gives both up before a signal can reach it.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from autockpt import new_files
from autockpt.launch import owner

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SAME_S = 1.0
"""The same signal again within this time is the same announcement: `timeout` sends two."""
DYING_S = 0.2
"""A parent that dies is gone by then."""
LOOK_S = 1.0
"""How often the launcher is looked at where the system cannot tell of its end."""


class Stopped(SystemExit, KeyboardInterrupt):
    """Leaves the loop after SIGINT: caught by who waits for either, and without a traceback."""


class ToldToEnd(SystemExit):
    """Leaves the loop after another signal.  `all_durable`: a restart loses nothing."""

    def __init__(self, code: int, *, all_durable: bool) -> None:
        super().__init__(code)
        self.all_durable = all_durable


class TerminationWatch:
    """Watches the signals that ask for an end, unless the script or a library handles them."""

    def __init__(
        self,
        first: Callable[[int], None],
        again: Callable[[int], None],
        *,
        launcher: int | None = None,
        launcher_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """All are called on a thread of ours: `first` with the first signal, `again` with the next.

        `launcher`: process whose end calls `launcher_ended`.
        """
        self._first, self._again = first, again
        self._launcher, self._launcher_ended = launcher, launcher_ended
        self.requested = 0
        """Number of the signal that asked us to leave, 0 before."""
        self.has_interrupted = False
        """The training thread has met such a signal, perhaps before our thread has."""
        self._heard: tuple[int, float] | None = None
        """The first signal that a person or a scheduler has sent, and when."""
        self._parent, self._of_parents_end = os.getppid(), 0
        """The parent, and the signal that the kernel sends at its end; 0: none."""
        self._parent_ended_s: float | None = None
        self._formers: dict[int, Any] = {}
        """The former handlers of signals, by number."""
        self._handler = self._handle
        self._former_fd = -1
        self._interrupts = False
        self._raised = threading.Event()
        self._masks = threading.local()
        self._closed = True

    def start(self) -> None:
        """Begins; signals are left alone where this is not the main thread."""
        on_main = threading.current_thread() is threading.main_thread()
        free = [number for number in WATCHED if on_main and _is_free(number)]
        if not free and self._launcher is None:
            return
        self._closed = False
        reader, writer = socket.socketpair()
        self._reader = new_files.socket_clear_of_scripts(reader)
        self._writer = new_files.socket_clear_of_scripts(writer)
        self._writer.setblocking(False)
        if free:
            self._of_parents_end = owner.number_at_parents_end()
            descriptor = self._writer.fileno()
            self._former_fd = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
            self._formers = {number: signal.signal(number, self._handler) for number in free}
            os.register_at_fork(
                before=self._hold, after_in_parent=self._let_through, after_in_child=self._give_up
            )
        threading.Thread(target=self._watch, name="autockpt-signals", daemon=True).start()

    def close(self) -> None:
        """The session is over: signals do what they did before.  On other threads it does nothing,
        because Python changes handlers on the main one alone."""
        if self._closed or threading.current_thread() is not threading.main_thread():
            return
        self._closed = True
        self._restore()
        self._writer.shutdown(socket.SHUT_RDWR)
        self._writer.close()
        # What is called at forks stays registered; it must not keep the session, and its model.
        self._first = self._again = lambda number: None
        self._launcher_ended = lambda: None

    def interrupt(self, patience_s: float) -> bool:
        """Stopped in the main thread; False when it does not come out of its call."""
        self._interrupts = True
        main = threading.main_thread().ident
        if main is not None and signal.getsignal(signal.SIGINT) is self._handler:
            signal.pthread_kill(main, signal.SIGINT)
        return self._raised.wait(patience_s)

    def _handle(self, number: int, frame: Any) -> None:
        self.has_interrupted = True
        if self._closed and number in self._formers:
            # A framework that keeps handlers, as Lightning does, has put this one back since.
            former = self._formers[number]
            signal.signal(number, former)
            if callable(former):
                former(number, frame)
            else:
                signal.raise_signal(number)
            return
        if number == signal.SIGINT and self._interrupts and not self._raised.is_set():
            self._raised.set()
            raise Stopped(128 + number)

    # ------------------------------------------------------------------ our thread

    def _watch(self) -> None:
        poll, process = select.poll(), None
        poll.register(self._reader, select.POLLIN)
        looked_at = self._launcher
        if looked_at is not None:
            with contextlib.suppress(OSError, AttributeError):
                process = new_files.clear_of_scripts(os.pidfd_open(looked_at))
                poll.register(process, select.POLLIN)
        while True:
            wait_s = LOOK_S if looked_at is not None and process is None else None
            ready = {fd for fd, _ in poll.poll(None if wait_s is None else wait_s * 1000)}
            if self._reader.fileno() in ready:
                data = self._reader.recv(16)
                if not data or self._closed:
                    break
                self._hear(data)
            if looked_at is not None and not _lives(looked_at, process, ready):
                if process is not None:
                    poll.unregister(process)
                looked_at = None
                with contextlib.suppress(Exception):
                    self._launcher_ended()
        if process is not None:
            os.close(process)
        self._reader.close()

    def _hear(self, data: bytes) -> None:
        self._pass_on(data)
        for number in data:
            if self._interrupts:
                return  # that was ours, or there is nothing left to do
            if number not in self._formers or signal.getsignal(number) is not self._handler:
                continue
            if not self.requested:
                self.requested = number
                with contextlib.suppress(Exception):
                    self._first(number)
            if self._is_of_parents_end(number):
                continue
            if self._heard is None:
                self._heard = number, time.monotonic()
            elif number != self._heard[0] or time.monotonic() - self._heard[1] > SAME_S:
                self._again(number)

    def _is_of_parents_end(self, number: int) -> bool:
        """Whether the kernel has sent it: for the parent's main thread, and for its others."""
        if number != self._of_parents_end:
            return False
        by_s = time.monotonic() + DYING_S
        while self._parent_ended_s is None and time.monotonic() < by_s:
            if self._parent != os.getppid() or not owner.is_alive(self._parent):
                self._parent_ended_s = time.monotonic()
            else:
                time.sleep(DYING_S / 20)
        ended_s = self._parent_ended_s
        return ended_s is not None and time.monotonic() - ended_s < SAME_S

    # ------------------------------------------------------------------ forks, and who was before

    def _hold(self) -> None:
        if not self._closed:
            self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, set(self._formers))

    def _let_through(self) -> None:
        if getattr(self._masks, "before", None) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)
            self._masks.before = None

    def _give_up(self) -> None:
        """In a forked child: as if we had never been there."""
        if not self._closed:
            self._closed = True
            self._restore()
        self._let_through()

    def _restore(self) -> None:
        if self._formers:
            in_force = signal.set_wakeup_fd(-1)
            wanted = self._former_fd if in_force == self._writer.fileno() else in_force
            with contextlib.suppress(ValueError, OSError):  # it may be closed by now
                signal.set_wakeup_fd(wanted, warn_on_full_buffer=False)
        for number, former in self._formers.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, former)

    def _pass_on(self, data: bytes) -> None:
        """Pass the bytes on to the former wake-up descriptor."""
        if self._former_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._former_fd, data)


def _lives(pid: int, process: int | None, ready: set[int]) -> bool:
    """`process`: its descriptor, which is among `ready` when it has ended; None: there is none."""
    return owner.is_alive(pid) if process is None else process not in ready


def exit_now(code: int) -> NoReturn:
    """Ends the process: flushes its output, and runs no exit functions."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def is_interactive() -> bool:
    """Whether a person types at this interpreter: an interrupt then is no end."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _is_free(number: int) -> bool:
    """Whether the signal does what Python's does without a script."""
    handler = signal.getsignal(number)
    if number == signal.SIGINT:
        return handler is signal.default_int_handler and not is_interactive()
    return handler is signal.SIG_DFL and not _is_caught(number)


def _is_caught(number: int) -> bool:
    """Whether a library handles it behind Python's back, as faulthandler.register does."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            caught = next(line.split()[1] for line in file if line.startswith("SigCgt"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)
