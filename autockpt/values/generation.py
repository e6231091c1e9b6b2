"""A checkpoint's identity: every message, file and digest carries it.

Source: protocol notes in docs/concepts/design.md.  After a rollback the same step is trained again
with other data, so the step alone identifies nothing: the term goes with it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from autockpt.values.errors import ConfigError

SCRATCH = "scratch"
"""In place of a checkpoint: a start that resumed none."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The line of history that the newest start continues; others were left behind on purpose."""

    term: int | None
    """Of the newest start; None: no start is known, and everything counts."""
    parents: tuple[Generation, ...] = ()
    """The checkpoint that it resumed, the one that the start of that one resumed, and so on."""
    is_whole: bool = False
    """The start from scratch is known."""

    @classmethod
    def of(cls, starts: Iterable[tuple[int, str]]) -> "Line":
        """From (term, resumed checkpoint) of all starts, the newest first; "": it is not known."""
        term: int | None = None
        sought: int | None = None
        parents: list[Generation] = []
        for number, resumed in starts:
            term = number if term is None else term
            if sought is not None and number != sought:
                continue
            if resumed == SCRATCH:
                return cls(term=term, parents=tuple(parents), is_whole=True)
            try:
                parents.append(Generation.from_text(resumed))
            except ConfigError:  # a damaged record, or one of an older version
                break
            sought = parents[-1].term
        return cls(term=term, parents=tuple(parents))

    @property
    def resumed_step(self) -> int | None:
        """Step that the newest start has resumed, 0 from scratch; None: not known."""
        if self.parents:
            return self.parents[0].step
        return 0 if self.is_whole else None

    def names(self, text: str) -> bool:
        """Whether a text is the name of such a checkpoint."""
        try:
            return self.holds(Generation.from_text(text))
        except ConfigError:
            return False

    def holds(self, generation: Generation) -> bool:
        """Whether it leads to the newest start, or was made by it."""
        if self.term is None or generation.term == self.term:
            return True
        if any(generation.term == one.term and generation <= one for one in self.parents):
            return True
        oldest = self.parents[-1].term if self.parents else self.term
        return not self.is_whole and generation.term < oldest
