"""Who a checkpoint is: the identity that every message, file and digest carries.

Source: protocol notes in docs/design.md.  `step` is a label for people and never an identity: after
a rollback the same step is trained again with other data.
"""

import re
from dataclasses import dataclass

from autockpt.values.errors import ConfigError

_NAME = re.compile(r"gen-e(\d{6})-s(\d{9})")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Generation:
    """One consistent state of all ranks, ordered by (epoch, seq)."""

    epoch: int
    """Incarnation of the run, +1 for every claim of the directory; the fencing token; >= 1."""
    seq: int
    """Iteration boundaries since the epoch began: grows within an epoch, equal on all ranks."""

    def __post_init__(self) -> None:
        if self.epoch < 1 or self.seq < 0:
            raise ConfigError(f"generation ({self.epoch}, {self.seq}): epoch >= 1 and seq >= 0")

    @property
    def name(self) -> str:
        """Directory name, e.g. gen-e000007-s000000042; sorts as the generation does."""
        return f"gen-e{self.epoch:06d}-s{self.seq:09d}"

    @classmethod
    def from_name(cls, name: str) -> "Generation":
        """The generation of a directory name.  Raises ConfigError for any other name."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigError(f"{name!r} is no generation; expected e.g. gen-e000001-s000000042")
        return cls(epoch=int(match.group(1)), seq=int(match.group(2)))

    def __str__(self) -> str:
        return f"e{self.epoch}s{self.seq}"
