"""Signals that end a job: the reactions of the launcher and its sidecars.

While ranks run, torchelastic's own handlers raise in the agent, which forwards the signal once.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

ENDING = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
SAME_S = 1.0
"""The same signal again within this time is the same one: `timeout` sends two."""


def heeded() -> tuple[int, ...]:
    """Of `ENDING`, all but a SIGHUP that `nohup` keeps away."""
    away = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in ENDING if number != signal.SIGHUP or not away)


class Interrupted(BaseException):
    """A signal arrived while nothing of torchelastic was there to forward it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def install(handler: Callable[[int, FrameType | None], Any]) -> dict[int, Any]:
    """Handle the signals that end a job; returns what handled them before."""
    return {number: signal.signal(number, handler) for number in heeded()}


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal handler that raises Interrupted."""
    raise Interrupted(number)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Before torchelastic has its handlers and after it, signals raise Interrupted."""
    before = install(interrupt)
    try:
        yield
    finally:
        _restore(before)


def told_to_end() -> threading.Event:
    """Set by SIGTERM, also by one that came while it was blocked (`follower`)."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return ended


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Signals that come meanwhile take effect at its end, by the handlers that stand then.

    A handler that raises interrupts any code.  Ours catches its own exceptions: it would take the
    signal for one of them, and the job would never end.
    """
    came: list[int] = []
    before = install(lambda number, frame: came.append(number))
    with contextlib.ExitStack() as ends:
        ends.callback(_again, came)
        ends.callback(_restore, before)
        yield


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _again(came: list[int]) -> None:
    with contextlib.ExitStack() as each:
        for number in reversed(came):
            each.callback(signal.raise_signal, number)


class Announced:
    """The signals while ranks live: the first is raised, the same within a second is the same one,
    any other kills the ranks."""

    def __init__(self, raised: Callable[[int], BaseException], kill: Callable[[], object]) -> None:
        self._raised, self._kill = raised, kill
        self._first: tuple[int, float] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """As a handler of signals."""
        now = time.monotonic()
        if self._first is None:
            self._first = number, now
            raise self._raised(number)
        if number != self._first[0] or now - self._first[1] > SAME_S:
            self._kill()


def kill_groups(pids: Iterable[int]) -> None:
    """End the processes, and all processes that they have started, at once."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
