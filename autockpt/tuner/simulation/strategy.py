"""A strategy as the simulator sees it: levels of checkpoints, and a calendar of their times.

A level is a place that checkpoints go to and that serves some failures: this node's memory, the
memory of a peer, the disk.  A calendar answers in closed form when the j-th checkpoint after a
resumption begins, so that the engine never walks over what nothing happens to.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol

from autockpt.values.errors import ConfigError
from autockpt.values.placement import Placement

Place = Literal["memory", "peer", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One place, the cost of a checkpoint there, and the cost of a restore from it."""

    place: Place
    every: int
    """Every how many checkpoints of the calendar one goes here."""
    stall_s: float
    """Training blocked, beyond what the levels before cost."""
    slowdown_s: float
    """Training time lost to interference, beyond that of the levels before."""
    latency_s: float
    """From the boundary until it can be restored from here."""
    restart_s: float
    """Detection and restart."""
    restore_s: float

    exposed_s: float = field(init=False, default=0.0)
    """Training time that one checkpoint costs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "exposed_s", self.stall_s + self.slowdown_s)


class Calendar(Protocol):
    """When checkpoints come, counted in iterations of useful work.

    `first` is the iteration that the job resumed from, `taken` how many checkpoints it had begun
    before that. j = 1 is the first checkpoint after it.
    """

    def step(self, first: int, taken: int, j: int) -> int:
        """The iteration at whose end checkpoint j is taken; `first` for j = 0."""
        ...

    def number(self, first: int, j: int) -> int:
        """The number of checkpoint j, of which a level takes the multiples of its `every`.

        It is `number(first, 0) + j`.
        """
        ...

    def guess(self, taken: int, steps: float) -> int:
        """About how many checkpoints come in that many iterations."""
        ...

    @property
    def interval_steps(self) -> int:
        """Iterations between two checkpoints, at the end of any climb."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Periodic:
    """Every `steps` iterations, at multiples of them."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"an interval of {self.steps} iterations: must be at least 1")

    def step(self, first: int, taken: int, j: int) -> int:
        """Multiples of `steps`; the job resumes at multiples only."""
        return first + j * self.steps

    def number(self, first: int, j: int) -> int:
        """Counted from the beginning of the job."""
        return first // self.steps + j

    def guess(self, taken: int, steps: float) -> int:
        """Exact."""
        return int(steps / self.steps)

    @property
    def interval_steps(self) -> int:
        """Always the same."""
        return self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Climbing:
    """The interval starts at `start` and grows by 2 at every checkpoint up to `end`, never back."""

    start: int
    end: int
    _sums: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if not 1 <= self.start <= self.end:
            raise ConfigError(f"a climb from {self.start} to {self.end}: must not fall below 1")
        sums = tuple(accumulate(range(self.start, self.end, 2), initial=0))
        object.__setattr__(self, "_sums", sums)

    def _until(self, count: int) -> int:
        """Iterations up to the count-th checkpoint of a job that never failed."""
        last = len(self._sums) - 1
        return self._sums[min(count, last)] + max(0, count - last) * self.end

    def step(self, first: int, taken: int, j: int) -> int:
        """The climb goes on where it was: the interval is kept in a file."""
        return first + self._until(taken + j) - self._until(taken)

    def number(self, first: int, j: int) -> int:
        """All checkpoints go everywhere."""
        return j

    def guess(self, taken: int, steps: float) -> int:
        """Exact on the climb and after it, to within one."""
        target = self._until(taken) + steps
        top = self._sums[-1]
        reached = bisect_right(self._sums, target) - 1 if target < top else len(self._sums) - 1
        return max(0, reached + int(max(0.0, target - top) / self.end) - taken)

    @property
    def interval_steps(self) -> int:
        """Where the climb ends."""
        return self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way to checkpoint one job, as the simulator replays it."""

    name: str
    iteration_s: float
    calendar: Calendar
    levels: tuple[Level, ...]
    """Cheapest restore first."""
    placement: Placement | None = None
    """Of the peer level: whose memory holds what."""
    says: str = ""
    """The rule in one sentence."""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.levels or not self.iteration_s > 0:
            raise ConfigError(f"{self.name}: needs a level and an iteration longer than 0 s")

    def level(self, place: Place) -> Level | None:
        """The level of a place, None if the strategy has none."""
        return next((level for level in self.levels if level.place == place), None)

    def interval_steps(self, place: Place) -> int:
        """Iterations between two checkpoints of a place at the end of any climb; 0: none."""
        level = self.level(place)
        return self.calendar.interval_steps * level.every if level is not None else 0

    def serves(self, lost: Sequence[int]) -> tuple[Level, ...]:
        """The levels that are alive after the loss of these nodes."""
        alive = {"disk": True, "memory": not lost}
        alive["peer"] = self.placement is not None and self.placement.survives(lost)
        return tuple(level for level in self.levels if alive[level.place])
