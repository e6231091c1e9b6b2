"""Whether this rank is to leave its function now, for all threads and for the session.

After the groups are aborted, a collective on a device may return with no result.  No boundary
behind that moment may become a checkpoint.
"""


class Unwound(BaseException):
    """Leaves the function at a boundary: another rank has died."""


class Unwinding:
    """The launcher's order to this process."""

    def __init__(self) -> None:
        self.is_ordered = False
        self.is_again = False
        """The function was called again, and has not come to a boundary since.  What fails now may
        fail because the process is not new."""

    def raise_if_ordered(self) -> None:
        """Raises Unwound behind the order."""
        if self.is_ordered:
            raise Unwound("another rank has died")

    def require_none(self) -> None:
        """A boundary is there.  Raises Unwound behind the order."""
        self.raise_if_ordered()
        self.is_again = False

    def begin_anew(self) -> None:
        """The function is about to be called again."""
        self.is_ordered, self.is_again = False, True


of_this_process = Unwinding()
