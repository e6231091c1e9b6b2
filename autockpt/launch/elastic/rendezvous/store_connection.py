"""A spare node connects again to the store of the rendezvous.

A store of torch never connects again by itself: each call behind a broken connection fails.  The
launcher of one node keeps the store as long as the job lives.  Where nothing listens at its address
any more, that launcher has ended, and the job with it.
"""

import contextlib
import socket
import time
from typing import Any

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 10.0
"""The wait between two attempts doubles up to here."""
ANSWER_S = 3.0
"""Of one attempt."""
REFUSED_S = 5.0
"""Nothing has listened there for so long: the job is over."""
GONE_S = 600.0
"""No answer at all for so long: the machine is gone."""


class StoreConnection:
    """Of a torchelastic handler, which has lost it."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._began_s = self._answered_s = time.monotonic()
        """CLOCK_MONOTONIC of the loss, and since when nothing but refusals has come."""
        self._wait_s, self._next_s = FIRST_WAIT_S, 0.0

    @property
    def is_gone(self) -> bool:
        """The store is not there any more."""
        now_s = time.monotonic()
        return now_s > self._began_s + GONE_S or now_s > self._answered_s + REFUSED_S

    def try_again(self) -> bool:
        """Whether the handler is connected, after an attempt if it is time for one."""
        if time.monotonic() < self._next_s:
            return False
        try:
            self._connect()
        except ConnectionRefusedError:
            pass
        except (OSError, RuntimeError):
            self._answered_s = time.monotonic()  # not even a refusal
        else:
            return True
        self._next_s = time.monotonic() + self._wait_s
        self._wait_s = min(LONGEST_WAIT_S, 2.0 * self._wait_s)
        return False

    def _connect(self) -> None:
        """Raises OSError or RuntimeError."""
        from torch import distributed

        dist: Any = distributed
        before = self._handler._store
        # torch's own attempt would block for the whole time limit of the store.
        with contextlib.closing(socket.create_connection((before.host, before.port), ANSWER_S)):
            pass
        store = dist.TCPStore(before.host, before.port, is_master=False, timeout=before.timeout)
        self._handler._store = self._handler._state_holder._backend._store = store
