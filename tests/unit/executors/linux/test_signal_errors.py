"""The exception of a script's own signal handler is never taken for one of ours."""

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autockpt.executors.linux.signal_errors import is_from_handler


class Preempted(Exception):
    """As scripts have them: an ordinary exception."""


def handler(number: int, frame: Any) -> None:
    """A function."""
    leave(number)


def leave(number: int) -> None:
    """What a handler calls."""
    raise Preempted(int(number))


class Guard:
    """A handler with a state."""

    def on_signal(self, number: int, frame: Any) -> None:
        """A method."""
        raise Preempted(int(number))

    def __call__(self, number: int, frame: Any) -> None:
        """The object itself."""
        raise Preempted(int(number))


@pytest.fixture
def install() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda one: signal.signal(signal.SIGUSR1, one)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("one", [
    handler, Guard().on_signal, Guard(), functools.partial(handler), lambda n, f: leave(n),
])  # fmt: skip
def test_it_is_told_from_an_error_of_ours(install: Callable[[Any], None], one: Any) -> None:
    """Whatever form the handler has; the same exception without a signal is none of it."""
    install(one)
    with pytest.raises(Preempted, match=str(int(signal.SIGUSR1))) as raised:
        signal.raise_signal(signal.SIGUSR1)
    assert is_from_handler(raised.value)
    with pytest.raises(Preempted, match="0") as called:
        leave(0)
    assert not is_from_handler(called.value)


def test_no_handler_runs_on_another_thread(install: Callable[[Any], None]) -> None:
    """There the same trace means nothing."""
    install(handler)
    found: list[bool] = []

    def work() -> None:
        try:
            handler(1, None)
        except Preempted as error:
            found.append(is_from_handler(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]
