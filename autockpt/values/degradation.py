"""A tier of checkpoints that does not hold what the plan wants, in words for people and scripts."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradedTier:
    """The tier, the start, the cause, and the response."""

    tier: Literal["memory", "other nodes", "disk", "object store"]
    since: str
    """UTC, ISO 8601; "" where no clock was available."""
    because: str
    """The last error."""
    doing: str
    """The action of autockpt meanwhile."""

    def __str__(self) -> str:
        since = f" since {self.since}" if self.since else ""
        return f"{self.tier} degraded{since}: {self.because}; {self.doing}"
