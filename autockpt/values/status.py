"""How a run stands, for people and schedulers."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """How a run stands, or ended.  Written as status.json, every ten seconds while it trains; also
    for schedulers that flatten exit codes."""

    schema_version: int = 1
    state: Literal["running", "finished", "failed", "interrupted"]
    exit_code: int | None
    """None: it has not ended, or was not started by `autockpt run`, which alone knows."""
    restarts: int
    """By `autockpt run`; 0 under another launcher."""
    last_step: int | None
    """Newest step that telemetry knows of; None: the job never reported one."""
    last_durable: str | None
    """Newest generation that is on disk."""
    last_protected: str | None = None
    """Newest generation that survives the loss of a node; None: none, or no copies were wanted."""
    last_remote: str | None = None
    """Newest generation that is in the object store; None: none, or no store was named."""
    unprotected_because: str = ""
    """Why copies on other nodes were missing in the end; "": they were not."""
    degraded: tuple[DegradedTier, ...] = ()
    """Tiers that did not satisfy the plan in the end: start, cause and response."""
    lacking: str = ""
    """Values of the script that the newest checkpoints lack, and why; "": none is known."""
    protected: bool
    """False: the script never called autockpt.attach, or no place holds a checkpoint of it.  At the
    end it is also False if the plan wants a disk and no checkpoint is durable."""
    report: str | None
    """Path of the report."""
    reason: str = ""
    """Why it ended, when it did not finish."""
    error: str = ""
    """The exception that ended the rank that failed first; "": another end, or not known."""
