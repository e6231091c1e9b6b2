"""Whether checkpoints reach the disk, and when to warn: at once, then at growing pauses.

Pure: times come in, sentences go out.  Without a warning, the lost run would be the first sign.
Warnings at every failed save would be ignored.
"""

from autockpt.values.status import DegradedTier

FIRST_PAUSE_S = 60.0
LONGEST_PAUSE_S = 3600.0
DOES = "every save that is due is tried again; memory holds the newest, older ones on disk stay"


class Standing:
    """Of the disk, as the keeper of one node sees it."""

    def __init__(self) -> None:
        self._reason = ""
        """The last error; "" while checkpoints become durable."""
        self._since = ""
        self._failures = 0
        self._durable = ""
        self._pause_s = FIRST_PAUSE_S
        self._again_s = 0.0

    def failed(self, now_s: float, wall: str, reason: str) -> str:
        """A checkpoint will not be durable, or none can be now; what to say, "" for nothing.

        `wall`: UTC, ISO 8601.
        """
        first = not self._reason
        self._reason, self._failures = reason, self._failures + 1
        if first:
            self._since, self._pause_s = wall, FIRST_PAUSE_S
            self._again_s = now_s + self._pause_s
            return f"no checkpoint reaches the disk: {reason}; {self._newest()}; training goes on"
        return self.still(now_s)

    def still(self, now_s: float) -> str:
        """Return messages that are due as time passes."""
        if not self._reason or now_s < self._again_s:
            return ""
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._again_s = now_s + self._pause_s
        return (
            f"no checkpoint has reached the disk since {self._since} ({self._failures} failed): "
            f"{self._reason}; {self._newest()}"
        )

    def committed(self, generation: str) -> str:
        """One is durable; what to say."""
        said = ""
        if self._reason:
            said = f"checkpoints reach the disk again, after {self._failures} that failed"
        self._reason, self._failures, self._durable = "", 0, generation
        return said

    @property
    def degraded(self) -> tuple[DegradedTier, ...]:
        """For status.json."""
        if not self._reason:
            return ()
        return (DegradedTier(tier="disk", since=self._since, because=self._reason, doing=DOES),)

    def _newest(self) -> str:
        return f"newest durable: {self._durable}" if self._durable else "nothing of it is durable"
