"""Where an iteration is, and which windows of it are still ahead: learned from its marks.

A lap goes from boundary to boundary.  A window opens when a chunk of compute (or a collective) ends
and closes when the next one begins; window n follows the n-th end, window 0 the boundary.  What is
known of a window is how long it was in the last laps, and counted on is what nearly all of them
had, so one that moves or shrinks is felt within two laps.  Time is an argument; no locks, no clock.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autockpt.values.pipeline import order_digest

MEMORY = 8
"""Laps remembered: as few as give a low quantile, so that windows which grow are believed soon."""
LEARNED = 3
"""Laps of one order before its windows are counted on."""


@dataclass(slots=True)
class Lap:
    """One lap as it happens."""

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
    """The last laps of one rank, and the one under way."""

    def __init__(self) -> None:
        self.now = Lap(began_s=0.0)
        self.refused = ""
        """Why windows that were handed in were not used."""
        self.relearned = 0
        """How often the order changed, and everything known was dropped."""
        self._order: list[str] = []
        self._digest: str | None = None
        self._known: list[deque[float]] = []
        self.forecasts_s: list[float] = []
        """Length of each window of a lap that can be counted on; 0 for those left alone."""
        self._all_s: list[float] = []
        """The same with those."""
        self.shortest_s = 0.0
        """Windows that are usually shorter are left alone."""
        self._handed: dict[int, float] = {}
        self._lap_s: deque[float] = deque(maxlen=MEMORY)
        self._until_step_s: deque[float] = deque(maxlen=MEMORY)
        self._odd = 0
        self._started = False

    # ------------------------------------------------------------------ marks

    def began(self, what: str, at_s: float) -> None:
        """Something begins to run: the window that was open closes."""
        lap = self.now
        self._close(at_s)
        number = len(lap.marks)
        lap.astray |= number < len(self._order) and what != self._order[number]
        lap.marks.append(what)
        lap.running += 1

    def ended(self, at_s: float) -> None:
        """It ended: a window opens, if nothing else runs."""
        lap = self.now
        lap.running = max(0, lap.running - 1)
        if not lap.running:
            lap.open_since_s = at_s

    def step_began(self, at_s: float) -> None:
        """The optimizer's step begins: the last window of the lap closes."""
        self._close(at_s)
        if self.now.step_began_s is None:
            self.now.step_began_s = at_s

    def boundary(self, at_s: float) -> None:
        """The lap ended and the next begins, with its first window open."""
        self.step_began(at_s)
        if self._started and self.now.marks:
            self._learn(self.now, at_s)
        self._started = True
        self.now = Lap(began_s=at_s, open_since_s=at_s)

    def _close(self, at_s: float) -> None:
        lap = self.now
        if lap.open_since_s is not None:
            lap.opened_s.append(lap.open_since_s)
            lap.lengths_s.append(at_s - lap.open_since_s)
            lap.open_since_s = None

    # ------------------------------------------------------------------ what is known

    def hand_in(self, lengths_s: Mapping[int, float], fingerprint: str) -> None:
        """Windows known from a profile, until the first lap shows whether it is this order."""
        self._handed, self._digest = dict(lengths_s), fingerprint
        self._forecast([lengths_s.get(n, 0.0) for n in range(max(lengths_s, default=-1) + 1)])

    def leave_alone(self, shortest_s: float) -> None:
        """Windows that are usually shorter than this are none, until it is said anew."""
        if shortest_s != self.shortest_s:
            self.shortest_s = shortest_s
            self._forecast(self._all_s)

    def _forecast(self, windows_s: list[float]) -> None:
        self._all_s = windows_s
        self.forecasts_s = [w if w >= self.shortest_s else 0.0 for w in windows_s]

    @property
    def learned(self) -> bool:
        """Whether windows can be counted on."""
        return bool(self._handed) or len(self._lap_s) >= LEARNED

    @property
    def lap_s(self) -> float:
        """Usual time of a lap; infinite while none is known."""
        return sorted(self._lap_s)[len(self._lap_s) // 2] if self._lap_s else float("inf")

    @property
    def until_step_s(self) -> float:
        """Time of a lap until its optimizer's step that nearly all had."""
        return nearly_all_had(self._until_step_s) if self._until_step_s else self.lap_s

    @property
    def window(self) -> int:
        """Number of the window that is open, or of the next."""
        return len(self.now.lengths_s)

    def left_s(self, at_s: float) -> float:
        """What is left of the window that is open, 0 when none is or it is longer than usual."""
        lap, forecasts = self.now, self.forecasts_s
        if lap.open_since_s is None or self.window >= len(forecasts) or lap.astray:
            return 0.0
        return max(0.0, forecasts[self.window] - (at_s - lap.open_since_s))

    @property
    def around_s(self) -> list[float]:
        """Usual lengths of the last window that has closed and of the one that opens now."""
        return self.forecasts_s[max(0, self.window - 1) : self.window + 1]

    @property
    def following(self) -> int:
        """Number of the first window of this lap that has not opened yet."""
        return self.window + (self.now.open_since_s is not None)

    def _learn(self, lap: Lap, at_s: float) -> None:
        if self._digest is not None:
            if order_digest(lap.marks) != self._digest:
                self.refused = (
                    f"windows of schedule {self._digest} do not fit this job's "
                    f"{order_digest(lap.marks)}: measured anew"
                )
                self._handed = {}
                self._forecast([])
            self._digest = None
        if lap.marks != self._order or len(lap.lengths_s) != len(self._known):
            self._odd += 1
            if self._order and self._odd < LEARNED:
                return  # an evaluation, not a new schedule
            self.relearned += bool(self._order)
            self._order = lap.marks
            self._known = [deque(maxlen=MEMORY) for _ in lap.lengths_s]
            self._lap_s.clear()
            self._until_step_s.clear()
            if not self._handed:
                self._forecast([])
        self._odd = 0
        self._lap_s.append(at_s - lap.began_s)
        self._until_step_s.append((lap.step_began_s or at_s) - lap.began_s)
        for known, length_s in zip(self._known, lap.lengths_s, strict=True):
            known.append(length_s)
        if len(self._lap_s) >= LEARNED:
            self._handed = {}
            self._forecast([nearly_all_had(known) for known in self._known])


def nearly_all_had(seen: Collection[float]) -> float:
    """What all of the last values reached, but for one when there are `MEMORY`."""
    return sorted(seen)[len(seen) // MEMORY]
