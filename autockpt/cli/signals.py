"""Signals that end a job: what the launcher does with them before, during and after the ranks live,
and what those beside it do.

While ranks run, torchelastic's own handlers raise in the agent, which forwards the signal once.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(BaseException):
    """A signal arrived while nothing of torchelastic was there to forward it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def install(handler: Callable[[int, FrameType | None], Any]) -> dict[int, Any]:
    """Handle the signals that end a job; returns what handled them before."""
    return {number: signal.signal(number, handler) for number in ENDING}


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
        for number, handler in before.items():
            signal.signal(number, handler)


def told_to_end() -> threading.Event:
    """Set by SIGTERM, also by one that came while it was blocked (`follower`)."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return ended


def second_signal_kills(pids: Callable[[], list[int]]) -> None:
    """From now on a signal to the launcher kills the ranks instead of waiting for them."""

    def kill(number: int, frame: FrameType | None) -> None:
        for pid in pids():
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)

    install(kill)
