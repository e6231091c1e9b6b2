"""A checkpoint's identity: every message, file and digest carries it.

Source: protocol notes in docs/concepts/design.md.  After a rollback the same step is trained again
with other data, so the step alone identifies nothing: the term goes with it.
"""

import re
from dataclasses import dataclass

from autockpt.values.errors import ConfigError

_NAME = re.compile(r"ckpt-t(\d{4,})-step-(\d{8,})(?:\.([1-9]\d*))?")
_TEXT = re.compile(r"step (\d+) \(term (\d+)\)(?:, attempt (\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Generation:
    """One consistent state of all ranks, ordered by (term, attempt, step)."""

    term: int
    """Incarnation of the run, +1 for every claim of the directory; the fencing token; >= 1."""
    attempt: int = 0
    """Times that the steps went back within the term.  The last step is saved again, or a loop
    begins behind iterations that were counted before it."""
    step: int
    """Training steps that the state has; the same on all ranks, and it grows within an attempt."""

    def __post_init__(self) -> None:
        if self.term < 1 or self.step < 0 or self.attempt < 0:
            raise ConfigError(
                f"checkpoint ({self.term}, {self.step}, {self.attempt}): expected term >= 1, "
                "step >= 0 and attempt >= 0"
            )

    @property
    def name(self) -> str:
        """Directory name, e.g. ckpt-t0002-step-00000231; of attempt 1 with `.1` behind it."""
        again = f".{self.attempt}" if self.attempt else ""
        return f"ckpt-t{self.term:04d}-step-{self.step:08d}{again}"

    @classmethod
    def from_name(cls, name: str) -> "Generation":
        """Return the checkpoint of a directory name.  Raises ConfigError for any other name."""
        match = _NAME.fullmatch(name)
        found = match and cls(
            term=int(match.group(1)), step=int(match.group(2)), attempt=int(match.group(3) or 0)
        )
        if found is None or found.name != name:
            raise ConfigError(
                f"{name!r} is no name of a checkpoint; expected e.g. ckpt-t0001-step-00000042"
            )
        return found

    @classmethod
    def from_text(cls, text: str) -> "Generation":
        """Return the checkpoint of a name or of `str(generation)`.  Raises ConfigError."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return cls.from_name(text)
        step, term, attempt = match.groups(default="0")
        return cls(term=int(term), step=int(step), attempt=int(attempt))

    def __str__(self) -> str:
        again = f", attempt {self.attempt}" if self.attempt else ""
        return f"step {self.step} (term {self.term}){again}"
