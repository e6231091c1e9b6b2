"""Where a rank is in its iteration, for its keeper: marks in the page of memory that both have.

The trainer writes a mark when its traffic begins and ends, at the optimizer's step and at the
boundary; the keeper looks now and then.  Neither waits for the other.  A mark that is overwritten
before it was read is lost; then one iteration less is learned from.
"""

import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from autockpt.executors.keeper.slots import CELL_MARK, CELL_MARKED, CELL_SPREAD, MARKS

_TIME_BITS, _NAME_BITS = 38, 24
_TIME_MASK, _NAME_MASK = (1 << _TIME_BITS) - 1, (1 << _NAME_BITS) - 1


class Kind(IntEnum):
    """What happened."""

    BEGAN = 0
    ENDED = 1
    STEP_BEGAN = 2
    BOUNDARY = 3


@dataclass(frozen=True, slots=True)
class Mark:
    """One of them, as read."""

    kind: Kind
    what: str
    """Names the same thing in every iteration; "" of a step."""
    at_s: float
    """CLOCK_MONOTONIC."""


class MarkWriter:
    """The trainer's end; a `ChunkListener`.  From any thread, without a system call."""

    def __init__(self, board: memoryview, now_s: Callable[[], float] = time.monotonic) -> None:
        self._cells = board.cast("Q")
        self._now_s = now_s
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}

    def spread(self, iterations: int) -> None:
        """Copies may take so many iterations; 0: no marks are made, windows are not known."""
        self._cells[CELL_SPREAD] = iterations

    def began(self, what: str) -> None:
        """Traffic begins."""
        self._write(Kind.BEGAN, what)

    def ended(self, what: str) -> None:
        """It ended."""
        self._write(Kind.ENDED, what)

    def step_began(self) -> None:
        """The optimizer's step begins."""
        self._write(Kind.STEP_BEGAN, "")

    def boundary(self) -> None:
        """It ended, and the iteration with it."""
        self._write(Kind.BOUNDARY, "")

    def _write(self, kind: Kind, what: str) -> None:
        name = self._names.get(what)
        if name is None:
            name = self._names[what] = zlib.crc32(what.encode()) & _NAME_MASK
        with self._lock:
            count = self._cells[CELL_MARKED]
            at_us = int(self._now_s() * 1e6) & _TIME_MASK
            mark = at_us << (_NAME_BITS + 2) | kind << _NAME_BITS | name
            self._cells[CELL_MARK + count % MARKS] = mark
            self._cells[CELL_MARKED] = count + 1  # only now, so that what is counted is there


class MarkReader:
    """The keeper's end, for one thread; marks made before it was created are not read."""

    def __init__(self, board: memoryview, now_s: Callable[[], float] = time.monotonic) -> None:
        self._cells = board.cast("Q")
        self._now_s = now_s
        self._read = int(self._cells[CELL_MARKED])

    @property
    def spread(self) -> int:
        """Iterations that copies may take; 0: windows are not known."""
        return int(self._cells[CELL_SPREAD])

    def read(self) -> list[Mark]:
        """Return the marks since the last call, oldest first."""
        marked = int(self._cells[CELL_MARKED])
        first = max(self._read, marked - MARKS)
        values = [int(self._cells[CELL_MARK + n % MARKS]) for n in range(first, marked)]
        self._read = marked
        lost = max(0, int(self._cells[CELL_MARKED]) + 1 - MARKS - first)  # written over meanwhile
        now_us = int(self._now_s() * 1e6)
        return [_mark(value, now_us) for value in values[lost:]]


def _mark(value: int, now_us: int) -> Mark:
    kind, name = Kind(value >> _NAME_BITS & 3), value & _NAME_MASK
    age_us = (now_us - (value >> (_NAME_BITS + 2))) & _TIME_MASK
    if age_us > _TIME_MASK // 2:
        age_us = 0  # marked after the clock was read
    return Mark(
        kind=kind,
        what=f"{name:06x}" if kind in (Kind.BEGAN, Kind.ENDED) else "",
        at_s=(now_us - age_us) / 1e6,
    )
