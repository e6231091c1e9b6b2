"""Where an iteration is, and which windows of it are still ahead: learned from its marks.

An iteration goes from boundary to boundary.  A window opens when a chunk of compute (or a
collective) ends and closes when the next one begins.  Window n follows the n-th end, window 0 the
boundary.  The forecast of a window is the length that nearly all of the last iterations had.  So it
follows a window that moves or shrinks within two iterations.  Time is an argument; no locks, no
clock.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autockpt.values.pipeline import order_digest

MEMORY = 8
"""Iterations remembered: just enough for a low quantile, so that windows that grow count soon."""
LEARNED = 3
"""Iterations of one order before its windows are counted on."""


@dataclass(slots=True)
class Iteration:
    """One iteration as it happens."""

    began_s: float
    marks: list[str] = field(default_factory=list)
    """What began, in order."""
    lengths_s: list[float] = field(default_factory=list)
    """Of the windows that have closed."""
    opened_s: list[float] = field(default_factory=list)
    """When they had opened."""
    open_since_s: float | None = None
    """Since when everything idles; None: something runs."""
    step_began_s: float | None = None
    """When the first optimizer's step began; None: not yet."""
    running: int = 0
    """Chunks or collectives under way; collectives may overlap."""
    astray: bool = False
    """Another order than the known one: an evaluation, or a new schedule."""


class IdleWindowForecast:
    """The last iterations of one rank, and the one under way."""

    def __init__(self) -> None:
        self.now = Iteration(began_s=0.0)
        self.refused = ""
        """Why windows that were handed in were not used."""
        self.relearned = 0
        """How often the order changed, and everything known was dropped."""
        self._order: list[str] = []
        self._digest: str | None = None
        self._known: list[deque[float]] = []
        self.forecasts_s: list[float] = []
        """Length of each window of an iteration that can be counted on; 0 for those left alone."""
        self._all_s: list[float] = []
        """The same with those."""
        self.shortest_s = 0.0
        """Windows that are usually shorter are left alone."""
        self._handed: dict[int, float] = {}
        self._iteration_s: deque[float] = deque(maxlen=MEMORY)
        self._until_step_s: deque[float] = deque(maxlen=MEMORY)
        self._odd = 0
        self._started = False

    # ------------------------------------------------------------------ marks

    def began(self, what: str, at_s: float) -> None:
        """Something begins to run: the window that was open closes."""
        iteration = self.now
        self._close(at_s)
        number = len(iteration.marks)
        iteration.astray |= number < len(self._order) and what != self._order[number]
        iteration.marks.append(what)
        iteration.running += 1

    def ended(self, at_s: float) -> None:
        """It ended: a window opens, if nothing else runs."""
        iteration = self.now
        iteration.running = max(0, iteration.running - 1)
        if not iteration.running:
            iteration.open_since_s = at_s

    def step_began(self, at_s: float) -> None:
        """The optimizer's step begins: the last window of the iteration closes."""
        self._close(at_s)
        if self.now.step_began_s is None:
            self.now.step_began_s = at_s

    def boundary(self, at_s: float) -> None:
        """The iteration ended and the next begins, with its first window open."""
        self.step_began(at_s)
        if self._started and self.now.marks:
            self._learn(self.now, at_s)
        self._started = True
        self.now = Iteration(began_s=at_s, open_since_s=at_s)

    def _close(self, at_s: float) -> None:
        iteration = self.now
        if iteration.open_since_s is not None:
            iteration.opened_s.append(iteration.open_since_s)
            iteration.lengths_s.append(at_s - iteration.open_since_s)
            iteration.open_since_s = None

    # ------------------------------------------------------------------ what is known

    def hand_in(self, lengths_s: Mapping[int, float], fingerprint: str) -> None:
        """Windows of a profile, until the first iteration shows whether it is this order."""
        self._handed, self._digest = dict(lengths_s), fingerprint
        self._forecast([lengths_s.get(n, 0.0) for n in range(max(lengths_s, default=-1) + 1)])

    def leave_alone(self, shortest_s: float) -> None:
        """Ignore windows that are usually shorter than this, until the next call."""
        if shortest_s != self.shortest_s:
            self.shortest_s = shortest_s
            self._forecast(self._all_s)

    def _forecast(self, windows_s: list[float]) -> None:
        self._all_s = windows_s
        self.forecasts_s = [w if w >= self.shortest_s else 0.0 for w in windows_s]

    @property
    def learned(self) -> bool:
        """Whether windows can be counted on."""
        return bool(self._handed) or len(self._iteration_s) >= LEARNED

    @property
    def iteration_s(self) -> float:
        """Usual time of an iteration; infinite while none is known."""
        return (
            sorted(self._iteration_s)[len(self._iteration_s) // 2]
            if self._iteration_s
            else float("inf")
        )

    @property
    def until_step_s(self) -> float:
        """Time of an iteration until its optimizer's step that nearly all had."""
        return nearly_all_had(self._until_step_s) if self._until_step_s else self.iteration_s

    @property
    def window(self) -> int:
        """Number of the window that is open, or of the next."""
        return len(self.now.lengths_s)

    def left_s(self, at_s: float) -> float:
        """Rest of the open window, s; 0 when none is open or it is longer than usual."""
        iteration, forecasts = self.now, self.forecasts_s
        if iteration.open_since_s is None or self.window >= len(forecasts) or iteration.astray:
            return 0.0
        return max(0.0, forecasts[self.window] - (at_s - iteration.open_since_s))

    @property
    def around_s(self) -> list[float]:
        """Usual lengths of the last window that has closed and of the one that opens now."""
        return self.forecasts_s[max(0, self.window - 1) : self.window + 1]

    @property
    def following(self) -> int:
        """Number of the first window of this iteration that has not opened yet."""
        return self.window + (self.now.open_since_s is not None)

    def _learn(self, iteration: Iteration, at_s: float) -> None:
        if self._digest is not None:
            if order_digest(iteration.marks) != self._digest:
                self.refused = (
                    f"windows of schedule {self._digest} do not fit this job's "
                    f"{order_digest(iteration.marks)}: measured anew"
                )
                self._handed = {}
                self._forecast([])
            self._digest = None
        if iteration.marks != self._order or len(iteration.lengths_s) != len(self._known):
            self._odd += 1
            if self._order and self._odd < LEARNED:
                return  # an evaluation, not a new schedule
            self.relearned += bool(self._order)
            self._order = iteration.marks
            self._known = [deque(maxlen=MEMORY) for _ in iteration.lengths_s]
            self._iteration_s.clear()
            self._until_step_s.clear()
            if not self._handed:
                self._forecast([])
        self._odd = 0
        self._iteration_s.append(at_s - iteration.began_s)
        self._until_step_s.append((iteration.step_began_s or at_s) - iteration.began_s)
        for known, length_s in zip(self._known, iteration.lengths_s, strict=True):
            known.append(length_s)
        if len(self._iteration_s) >= LEARNED:
            self._handed = {}
            self._forecast([nearly_all_had(known) for known in self._known])


def nearly_all_had(seen: Collection[float]) -> float:
    """What all of the last values reached, but for one when there are `MEMORY`."""
    return sorted(seen)[len(seen) // MEMORY]
