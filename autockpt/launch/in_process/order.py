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

    def require_none(self) -> None:
        """Raises Unwound behind the order."""
        if self.is_ordered:
            raise Unwound("another rank has died")


of_this_process = Unwinding()
