"""Memory in which the ranks of a node read a checkpoint together.

It is made while they still wait for the decision: new pages, and huge ones, take a while.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from autockpt.executors.linux.memory import Arena, memory_to_read_in
from autockpt.executors.protocol.messages import RestoreShard
from autockpt.values.errors import AutockptError


class SharedBuffers:
    """Of one attempt to restore at a time.  Used by the keeper's thread."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._attempt: tuple[int, int] | None = None
        """Term and attempt of those it was lent to."""
        self._making: Future[Arena] | None = None

    def prepare(self, ranks: int) -> None:
        """Begin to make it, unless it is begun."""
        if self._making is None:
            self._making = Future()
            work = (self._making, ranks)
            threading.Thread(target=_make, args=work, name="autockpt-reading", daemon=True).start()

    def lend(self, order: RestoreShard) -> int | None:
        """Its descriptor, the same for all readers of an attempt; None: every rank reads alone."""
        attempt = (order.term, order.attempt)
        if self._attempt not in (None, attempt):
            self.close()
        self._attempt = attempt
        self.prepare(len(order.readers))
        assert self._making is not None
        try:
            return self._making.result().fd
        except (AutockptError, OSError) as error:
            self._log(f"every rank reads alone: {error}")
            return None

    def close(self) -> None:
        """Give it back; ranks it was lent to keep it as long as they read."""
        if self._making is not None:
            self._making.add_done_callback(_give_back)
        self._making = self._attempt = None


def _make(into: Future[Arena], ranks: int) -> None:
    try:
        into.set_result(memory_to_read_in(ranks))
    except BaseException as error:  # the keeper's thread meets it
        into.set_exception(error)


def _give_back(made: Future[Arena]) -> None:
    if made.exception() is None:
        made.result().close()
