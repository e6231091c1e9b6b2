"""Leases on the memory of an image: `revoke` returns when no thread uses the memory.

A slot is overwritten as soon as its owner decides so.  A thread enters the lease before it reads or
writes the slot, and `revoke` waits for the threads inside.  `on_revoke` ends them (it shuts their
sockets down), so the wait is one system call long.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autockpt.values.errors import AutockptError


class Revoked(AutockptError):
    """The memory is not to be touched any more; the message says why."""


class Lease:
    """The right to read or write one piece of memory."""

    def __init__(self, on_revoke: Callable[[], None] = lambda: None) -> None:
        self._on_revoke = on_revoke
        self._changed = threading.Condition()
        self._inside = 0
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why it was revoked; None: it was not."""
        return self._reason

    @contextmanager
    def use(self) -> Iterator[None]:
        """Inside the memory may be touched.  Raises Revoked."""
        with self._changed:
            if self._reason is not None:
                raise Revoked(self._reason)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def revoke(self, reason: str) -> None:
        """Return when no thread is inside and none can enter.  The first reason stays."""
        self.end(reason)
        with self._changed:
            self._changed.wait_for(lambda: self._inside == 0)

    def end(self, reason: str) -> None:
        """As `revoke`, without waiting: for a thread that may be inside itself."""
        with self._changed:
            if self._reason is None:
                self._reason = reason
        self._on_revoke()
