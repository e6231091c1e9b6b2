"""The cost of a lossy generation for the user's own training: losses after a resume.

Several lossless resumes with other data orders show how far losses spread by chance.  The lossy
resume has the data order of the middle one of them.  If it lies inside the spread, the loss of bits
matters less than a change of order.
"""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autockpt import new_files
from autockpt.integrations.formats.archive.reading import Archive
from autockpt.values.errors import ConfigError, StorageError
from autockpt.values.record import from_json, to_json

SUFFIX = ".quality.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One measurement of one generation."""

    schema_version: int = 1
    generation: str
    codec: str
    steps: int
    """Iterations after the resume that the means are taken over."""
    lossless: tuple[float, ...]
    """Mean loss of each lossless resume, in the order of the seeds."""
    seed: int
    """The seed of the lossy resume."""
    lossy: float
    """Its mean loss."""
    command: str

    def __post_init__(self) -> None:
        if not self.lossless or not 1 <= self.seed <= len(self.lossless):
            raise ConfigError(f"quality of {self.generation}: no lossless resume of its seed")

    @property
    def inside(self) -> bool:
        """The lossy resume is within the spread of the lossless ones."""
        return min(self.lossless) <= self.lossy <= max(self.lossless)

    @property
    def difference(self) -> float:
        """Lossy minus lossless, with the same data."""
        return self.lossy - self.lossless[self.seed - 1]

    def __str__(self) -> str:
        """For people."""
        where = "inside" if self.inside else "OUTSIDE"
        return (
            f"mean loss of {self.steps} resumed steps {self.lossy:.4f}, {self.difference:+.4f} to "
            f"the lossless resume, {where} the {min(self.lossless):.4f} to "
            f"{max(self.lossless):.4f} of {len(self.lossless)} lossless ones"
        )


def middle_seed(losses: Sequence[Sequence[float]]) -> int:
    """The seed, from 1, whose mean is the median of all."""
    means = [statistics.fmean(one) for one in losses]
    return 1 + sorted(range(len(means)), key=means.__getitem__)[len(means) // 2]


def stored_quality(archive: Archive, name: str) -> Quality | None:
    """Return the stored measurement of a generation; None: none.

    Raises ConfigError for a damaged file.
    """
    path = os.path.join(archive.path, name + SUFFIX)
    try:
        with open(path, "rb") as file:
            return from_json(Quality, file.read(2**20), where=path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def store_quality(archive: Archive, quality: Quality) -> None:
    """Beside the generation; a former result is replaced.  Raises StorageError."""
    path = os.path.join(archive.path, quality.generation + SUFFIX)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8", opener=new_files.readable) as file:
            file.write(to_json(quality, indent=1))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
