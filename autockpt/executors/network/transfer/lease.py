"""Who is inside the memory of an image right now: `revoke` returns when nobody is.

A slot is overwritten as soon as its owner decides so; a thread that is about to read or write it
asks first, and whoever revokes waits for those inside.  They are thrown out by what `on_revoke`
does (their sockets are shut down), so the wait is that for one system call.
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
        """Returns when nobody is inside, and nobody will be.  The first reason stays."""
        self.end(reason)
        with self._changed:
            self._changed.wait_for(lambda: self._inside == 0)

    def end(self, reason: str) -> None:
        """As `revoke`, without waiting: for a thread that may be inside itself."""
        with self._changed:
            if self._reason is None:
                self._reason = reason
        self._on_revoke()
