"""How far the trackers of a run have got, over all of its starts: `trackers.json`.

A killed process leaves lines in the telemetry that no tracker has.  Steps that are trained again
have values in the trackers already.  The next process reads here where to go on, and which steps
an append-only tracker must not get twice.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autockpt import new_files

FILE = "trackers.json"
MOST_BYTES = 2**20


@dataclass(slots=True)
class Sent:
    """Replaced as a whole after each round of values; a lost file costs values sent twice."""

    training: int = 1
    """Trainings that began anew in this run: each has a run of its own in a tracker."""
    offsets: dict[str, int] = field(default_factory=dict)
    """By telemetry file the bytes that were handed on."""
    steps: dict[str, int] = field(default_factory=dict)
    """By name of a value the greatest step of which trackers have it."""

    @classmethod
    def read(cls, run_dir: str) -> "Sent":
        """Of the former processes; as at first where there is none, or it cannot be read."""
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            data = json.loads((Path(run_dir) / FILE).read_bytes()[:MOST_BYTES])
            return cls(
                training=int(data["training"]), offsets=_numbers(data["offsets"]),
                steps=_numbers(data["steps"]),
            )  # fmt: skip
        return cls()

    def begin_anew(self) -> None:
        """Another training begins at step 0, in a run of its own."""
        self.training, self.steps = self.training + 1, {}

    def write(self, run_dir: str) -> None:
        """For the next process; a disk that is full leaves the former file."""
        path = Path(run_dir) / FILE
        temporary = path.with_name(f".{FILE}.{os.getpid()}")
        with contextlib.suppress(OSError):
            with open(temporary, "w", encoding="utf-8", opener=new_files.private) as file:
                json.dump(asdict(self), file)
            os.replace(temporary, path)

    def unsent(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """The values of a step that no tracker has, by name."""
        return {name: value for name, value in values.items() if step > self.steps.get(name, -1)}

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Trackers have these values of a step."""
        for name in values:
            self.steps[name] = max(step, self.steps.get(name, -1))


def _numbers(data: Any) -> dict[str, int]:
    return {str(name): int(number) for name, number in dict(data).items()}
