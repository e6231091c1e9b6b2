"""The failure log: one line per interruption; feeds the failure rates of later runs."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """One interruption of the job and what it took to go on."""

    schema_version: int = 1
    wall: str
    """UTC, ISO 8601; for people."""
    kind: Literal["process", "node", "storage", "silent"]
    """process: the memory of the node survived; node: it did not."""
    what: str
    """trainer, keeper, trainers+keeper, launcher."""
    node: int
    step: int
    exposure_s: float
    """Training time since the previous interruption or the start; the posterior's exposure."""
    detect_s: float | None = None
    restart_s: float | None = None
    restore_s: float | None = None
    source: str = ""
    """Where the state came back from: memory, disk, "" when unknown."""
    lost_steps: int = 0
    lost_s: float = 0.0
