"""Cost of background work to the iteration beside it, from interleaved iterations.

Units of a few iterations take turns, with and without work, in random order.  A machine that slows
down over the minute therefore slows all of them.  Stalls (the copy at the boundary, the wait at the
fence) are taken out of the iteration and reported apart.  The remainder is disturbance of caches,
memory and cores.  Driven from the training thread: `boundary()` between iterations, `fence()`
before each optimizer step.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from autockpt.profiles.samples import UnitSample

T = TypeVar("T")

JOIN_S = 120.0
"""Longest wait for background work that outlives its unit."""


class PlannedUnit(Protocol):
    """Iterations in a row with the same work."""

    @property
    def work(self) -> str: ...
    @property
    def round(self) -> int: ...
    @property
    def iterations(self) -> int: ...


@dataclass(slots=True)
class Outcome:
    """Result of one unit of work."""

    busy_s: float = 0.0
    stalls_s: list[float] = field(default_factory=list)
    copies_s: list[float] = field(default_factory=list)
    persists_s: list[float] = field(default_factory=list)
    encoded_bytes_per_s: float = 0.0


class Work(Protocol):
    """Background work.  All methods run on the training thread, in this order."""

    def begin(self) -> None:
        """At each boundary of the unit: an iteration follows."""

    def fence(self) -> None:
        """Right before an optimizer step of that iteration."""

    def finish(self) -> Outcome:
        """After the last iteration of the unit: wait for the end and report."""


class Quiet:
    """No work."""

    def begin(self) -> None:
        """Nothing."""

    def fence(self) -> None:
        """Nothing."""

    def finish(self) -> Outcome:
        """Nothing happened."""
        return Outcome()


class SnapshotMover(Protocol):
    """Takes one snapshot at a time into memory of its own."""

    def begin(self) -> float:
        """At the boundary: copies what must be copied now, starts the rest; seconds blocked."""

    def fence(self) -> float:
        """Before the optimizer step: waits for the rest; seconds blocked."""

    def wait_copied(self) -> float:
        """From any thread: waits for the last byte; seconds since the boundary."""


class CopyWork:
    """A snapshot in every iteration of the unit."""

    def __init__(self, mover: SnapshotMover) -> None:
        self._mover = mover
        self._outcome = Outcome()
        self._stall_s: float | None = None

    def begin(self) -> None:
        """Starts a snapshot."""
        self._stall_s = self._mover.begin()

    def fence(self) -> None:
        """Waits for it; further optimizer steps of the iteration have nothing to wait for."""
        if self._stall_s is None:
            return
        self._outcome.stalls_s.append(self._stall_s + self._mover.fence())
        self._stall_s = None
        copy_s = self._mover.wait_copied()
        self._outcome.copies_s.append(copy_s)
        self._outcome.busy_s += copy_s

    def finish(self) -> Outcome:
        """Return the cost of the copies."""
        self.fence()
        outcome, self._outcome = self._outcome, Outcome()
        return outcome


class WriteWork:
    """Writes one file after the other for the length of the unit, `limit` files at most."""

    def __init__(self, write: Callable[[], None], *, limit: int = 64) -> None:
        self._write, self._limit = write, limit
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._busy_s = 0.0
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Starts the writing thread at the first boundary."""
        if self._thread is None:
            self._stop.clear()
            self._busy_s = 0.0
            self._thread = threading.Thread(target=self._loop, daemon=True)
            self._thread.start()

    def fence(self) -> None:
        """Writing disturbs no state."""

    def finish(self) -> Outcome:
        """Stops after the file that is being written.  Raises what a write raised."""
        self._stop.set()
        ended = time.perf_counter()
        if self._thread is not None:
            self._thread.join(timeout=JOIN_S)
            self._thread = None
        if self._error is not None:
            raise self._error
        # The part after the unit disturbed no iteration.
        overtime = time.perf_counter() - ended
        return Outcome(busy_s=max(0.0, self._busy_s - overtime))

    def _loop(self) -> None:
        began = time.perf_counter()
        try:
            for _ in range(self._limit):
                if self._stop.is_set():
                    break
                self._write()
        except Exception as error:  # raised again by finish, on the training thread
            self._error = error
        self._busy_s = time.perf_counter() - began


class EncodeWork:
    """Encodes for the length of the unit, each encoder on a thread of its own.

    `encoders`: each encodes what comes next and says how many raw bytes that were.
    """

    def __init__(self, encoders: Sequence[Callable[[], int]]) -> None:
        self._encoders = encoders
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._bytes_per_s: list[float] = []
        self._error: BaseException | None = None
        self._began = 0.0

    def begin(self) -> None:
        """Starts the threads at the first boundary."""
        if self._threads:
            return
        self._stop.clear()
        self._bytes_per_s, self._began = [], time.perf_counter()
        self._threads = [
            threading.Thread(target=self._loop, args=(encode,), daemon=True)
            for encode in self._encoders
        ]
        for thread in self._threads:
            thread.start()

    def fence(self) -> None:
        """Encoding disturbs no state."""

    def finish(self) -> Outcome:
        """Stops after the pieces that are being encoded.  Raises what an encoder raised."""
        self._stop.set()
        busy_s = time.perf_counter() - self._began
        for thread in self._threads:
            thread.join(timeout=JOIN_S)
        self._threads = []
        if self._error is not None:
            raise self._error
        return Outcome(busy_s=busy_s, encoded_bytes_per_s=sum(self._bytes_per_s))

    def _loop(self, encode: Callable[[], int]) -> None:
        """Counts the pieces that ended within the unit: the last one has the cores to itself."""
        began = ended = time.perf_counter()
        done = 0
        try:
            while not self._stop.is_set():
                count = encode()
                if not self._stop.is_set():
                    done, ended = done + count, time.perf_counter()
        except Exception as error:  # raised again by finish, on the training thread
            self._error = error
        self._bytes_per_s.append(done / max(ended - began, 1e-9))


class PersistWork:
    """One snapshot and its way to the disk, beside as many iterations as that takes."""

    def __init__(self, mover: SnapshotMover, write: Callable[[], None]) -> None:
        self._copy = CopyWork(mover)
        self._mover, self._write = mover, write
        self._thread: threading.Thread | None = None
        self._took_s = 0.0
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Starts both at the first boundary."""
        if self._thread is None:
            began = time.perf_counter()
            self._copy.begin()
            self._thread = threading.Thread(target=self._persist, args=(began,), daemon=True)
            self._thread.start()

    def fence(self) -> None:
        """Waits for the copy."""
        self._copy.fence()

    def finish(self) -> Outcome:
        """Waits until the file is durable.  Raises what copy or write raised."""
        ended = time.perf_counter()
        if self._thread is not None:
            self._thread.join(timeout=JOIN_S)
            self._thread = None
        overtime = time.perf_counter() - ended
        outcome = self._copy.finish()
        if self._error is not None:
            raise self._error
        outcome.persists_s.append(self._took_s)
        outcome.busy_s = max(0.0, self._took_s - overtime)
        return outcome

    def _persist(self, began: float) -> None:
        try:
            self._mover.wait_copied()
            self._write()
        except Exception as error:  # raised again by finish
            self._error = error
        self._took_s = time.perf_counter() - began


class InterferenceProbe:
    """Walks through planned units, one iteration per call of `boundary`.

    Work that raises is taken out for good (`errors`); its iterations go on without it, because
    other ranks count on their number.
    """

    def __init__(
        self,
        units: Sequence[PlannedUnit],
        works: Mapping[str, Work],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.samples: list[UnitSample] = []
        self.errors: dict[str, str] = {}
        """Work that failed, and why."""
        self._units, self._works, self._clock = list(units), {"quiet": Quiet(), **works}, clock
        self._index = 0
        self._done = 0
        self._began = 0.0
        self._running = False

    @property
    def iterations(self) -> int:
        """Iterations that all units take together."""
        return sum(unit.iterations for unit in self._units)

    @property
    def fraction(self) -> float:
        """How much of the iterations lies behind, 0..1."""
        done = sum(unit.iterations for unit in self._units[: self._index]) + self._done
        return min(1.0, done / max(1, self.iterations))

    @property
    def rounds(self) -> int:
        """Rounds that are complete."""
        if self._index == len(self._units):
            return 1 + self._units[-1].round if self._units else 0
        return self._units[self._index].round

    def boundary(self) -> bool:
        """Ends an iteration and begins the next; False when no further one is needed."""
        if self._running:
            self._done += 1
            if self._done == self._units[self._index].iterations:
                self._end_unit()
        if self._index == len(self._units):
            return False
        if not self._running:
            self._running, self._done, self._began = True, 0, self._clock()
        self._guarded(self._work.begin)
        return True

    def fence(self) -> None:
        """Before an optimizer step."""
        if self._running:
            self._guarded(self._work.fence)

    def abandon(self) -> None:
        """The training ends in the middle of a unit: waits for its work and drops it."""
        if self._running:
            self._guarded(self._work.fence)
            self._guarded(self._work.finish)
            self._running = False

    @property
    def _work(self) -> Work:
        return self._works[self._units[self._index].work]

    def _guarded(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:
            name = self._units[self._index].work
            self.errors[name] = f"{type(error).__name__}: {error}"
            self._works[name] = Quiet()
            return None

    def _end_unit(self) -> None:
        unit = self._units[self._index]
        total_s = self._clock() - self._began
        outcome = self._guarded(self._work.finish) or Outcome()
        self._running, self._done = False, 0
        self._index += 1
        if unit.work in self.errors:
            return
        self.samples.append(
            UnitSample(
                work=unit.work,
                round=unit.round,
                iterations=unit.iterations,
                total_s=max(1e-9, total_s - sum(outcome.stalls_s)),
                busy_s=outcome.busy_s,
                stalls_s=tuple(outcome.stalls_s),
                copies_s=tuple(outcome.copies_s),
                persists_s=tuple(outcome.persists_s),
                encoded_bytes_per_s=outcome.encoded_bytes_per_s,
            )
        )
