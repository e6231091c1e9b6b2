"""Where a rank stands among the axes of a job: pure numbers, no process groups."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autockpt.values.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """This rank's place in a grid of ranks, the last axis fastest, as in a DeviceMesh."""

    axes: Mapping[str, int]
    """Ranks along each axis, slowest first: {"pp": 2, "dp": 2, "tp": 4}."""
    rank: int
    ranks: tuple[int, ...] = field(default=())
    """Ranks in the order of the grid; (): 0, 1, 2, ..."""

    def __post_init__(self) -> None:
        total = math.prod(self.axes.values())
        ranks = self.ranks or tuple(range(total))
        if len(ranks) != total or self.rank not in ranks:
            raise ConfigError(
                f"coordinates: {dict(self.axes)} are {total} ranks, got {len(ranks)} ranks and "
                f"asked for rank {self.rank}"
            )
        object.__setattr__(self, "ranks", ranks)

    @classmethod
    def of(cls, mesh: Any, rank: int) -> "Coordinates":
        """The place of a rank in a DeviceMesh whose dimensions have names."""
        names = mesh.mesh_dim_names or ()
        axes = dict(zip(names, mesh.mesh.shape, strict=True))
        return cls(axes=axes, rank=rank, ranks=tuple(mesh.mesh.flatten().tolist()))

    def at(self, axis: str) -> int:
        """Number of this rank along an axis.  Raises ConfigError for an unknown one."""
        size = self.size(axis)
        sizes = list(self.axes.values())
        inner = math.prod(sizes[list(self.axes).index(axis) + 1 :])
        return self.ranks.index(self.rank) // inner % size

    def size(self, axis: str) -> int:
        """Ranks along an axis.  Raises ConfigError for an unknown one."""
        if axis not in self.axes:
            known = ", ".join(self.axes) or "none"
            raise ConfigError(
                f"no axis {axis!r}; this job has {known}; one that it does not use has one rank: "
                f"axes={{..., {axis!r}: 1}}"
            )
        return self.axes[axis]

    def along(self, axes: Iterable[str]) -> tuple[int, ...]:
        """Ranks that differ from this one along `axes` only, it included; (): no other."""
        moving = {axis for axis in axes if self.size(axis)}
        number, stride = self.ranks.index(self.rank), 1
        steps = []
        for axis, size in reversed(list(self.axes.items())):
            if axis in moving:
                number -= self.at(axis) * stride
                steps.append(range(0, size * stride, stride))
            stride *= size
        found = sorted(self.ranks[number + sum(step)] for step in itertools.product(*steps))
        return tuple(found) if len(found) > 1 else ()
