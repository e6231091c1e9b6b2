"""Whether this rank is to leave its function now, for all threads and for the session.

After the groups are aborted, a collective on a device may return with no result.  No boundary
behind that moment may become a checkpoint.
"""

import contextlib
from collections.abc import Callable, Iterator


class Unwound(BaseException):
    """Leaves the function at a boundary: another rank has died."""


class Unwinding:
    """The launcher's order to this process."""

    def __init__(self) -> None:
        self.is_ordered = False
        self._end_wait: Callable[[], object] | None = None
        self.is_again = False
        """The function was called again, and has not come to a boundary since.  What fails now may
        fail because the process is not new."""

    def raise_if_ordered(self) -> None:
        """Raises Unwound behind the order."""
        if self.is_ordered:
            raise Unwound("another rank has died")

    def give(self) -> None:
        """Orders it, from any thread."""
        self.is_ordered = True
        if (end := self._end_wait) is not None:
            end()

    @contextlib.contextmanager
    def ends(self, wait: Callable[[], object]) -> Iterator[None]:
        """The order calls `wait`, which ends a wait for other ranks; perhaps twice."""
        self._end_wait = wait
        if self.is_ordered:
            wait()
        try:
            yield
        finally:
            self._end_wait = None

    def require_none(self) -> None:
        """A boundary is there.  Raises Unwound behind the order."""
        self.raise_if_ordered()
        self.is_again = False

    def begin_anew(self) -> None:
        """The function is about to be called again."""
        self.is_ordered, self.is_again = False, True


of_this_process = Unwinding()
