"""Names of tensors that the script changes behind boundaries, kept for the rank's next process.

A moving average of weights does so, and so does a second forward pass.  The snapshot that finds
it out is lost, and these tensors are copied at the boundary from then on.  A process that reads
the names loses none, however short its life is.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autockpt import new_files
from autockpt.values.errors import AutockptError
from autockpt.values.record import from_json, to_json

FOLDER = "standby"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangingTensors:
    """The names of one rank's."""

    schema_version: int = 1
    names: tuple[str, ...] = ()


def path_of(run_directory: str | os.PathLike[str], rank: int) -> Path:
    """Where a rank's record stands."""
    return Path(run_directory) / FOLDER / f"changing-{rank:05d}.json"


def read(path: Path) -> frozenset[str]:
    """The names in the record at `path`; none where there is none that can be read."""
    try:
        record = from_json(ChangingTensors, path.read_text(encoding="utf-8"), where=str(path))
    except (OSError, ValueError, AutockptError):
        return frozenset()
    return frozenset(record.names)


def write(path: Path, names: Iterable[str]) -> None:
    """Replaces the record.  Where that fails, the next process finds them out by itself."""
    record = ChangingTensors(names=tuple(sorted(names)))
    with contextlib.suppress(OSError):
        new_files.make_directory(path.parent, new_files.PRIVATE_DIRECTORY)
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8", opener=new_files.private) as out:
            out.write(to_json(record))
        os.replace(temporary, path)
