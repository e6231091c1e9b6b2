"""A throttle that opens while the training idles: chunks move in the idle windows of an iteration.

First fit: a chunk passes when it takes less time than the rest of the open window, with a margin.
Otherwise it waits for a longer window.  One chunk moves at a time, so a window that closes early
costs one chunk of overlap.  Short gaps stay unused while the longest windows take all bytes.

Bytes that do not fit into the windows ahead of the optimizer's step move beside the compute, just
fast enough.  If windows are too small to matter, no chunk is held back: plain lazy copying.  The
forecast is scaled by the share of promised bytes that the last transfers moved.  At the staging
barrier every chunk passes.  Chunks are as large as the windows in use allow.

Source for the windows: BAFT (Front. Comput. Sci. 19(1), 2025).  Source for the partition of traffic
by alpha + n / B with a safety margin, and for spreading over iterations: Gemini (SOSP'23).
"""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autockpt.executors.throttle.window_forecast import IdleWindowForecast, nearly_all_had

MARGIN = 0.2
"""Part of a window that is left free: chunks and windows scatter by about this much."""
UNKNOWN_BYTES_PER_S = 2e9
"""Assumed speed of an unmeasured mover: slower than any host copy.  It is soon measured."""
YIELD_SHARE = 0.1
"""Windows that take less than this fraction of the bytes are not worth waiting for."""
ALPHA_S = 50e-6
"""Start of a chunk: waking the mover, entering Python again."""
CHUNKS = tuple(2**20 * n // 4 for n in (16, 8, 4, 2, 1))
"""Sizes a mover is offered, bytes, the largest first; smaller ones cost more than they fill."""
DEVICE_CHUNKS = tuple(2**20 * n for n in (64, 32, 16, 8, 4))
"""The same for copies of a device: tens of GB/s, and an event to wait for behind each."""
SPARE = 1.25
"""The longest windows are enough when they take this many times what is to move."""
NEARLY_ALL = 0.95
"""A larger chunk that fills the windows this well is as good as the best."""
MEMORY_RATES = 15
"""Chunks whose pace is remembered; the median counts."""
MEMORY_KEPT = 8
"""Transfers whose share of promised bytes is remembered."""
MOVES = 512
"""Chunks remembered for the report."""

Passed = Literal["window", "overlap", "fence"]


@dataclass(slots=True)
class Move:
    """One chunk on its way."""

    began_s: float
    ended_s: float
    """Expected; as measured once its mover asks for the next."""
    nbytes: int
    how: Passed


@dataclass(slots=True)
class WindowUse:
    """How the bytes of one transfer passed."""

    nbytes: int = 0
    passed: dict[Passed, int] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0))
    """Bytes by how they passed."""
    blocked_s: float = 0.0
    reason: str = ""
    """Why windows were not used, "" if they were."""
    chunk_bytes: int = CHUNKS[0]
    moves: deque[Move] = field(default_factory=lambda: deque(maxlen=MOVES))
    """The newest chunks."""

    @property
    def share(self) -> float:
        """Fraction of the bytes that passed inside windows."""
        return self.passed["window"] / max(1, sum(self.passed.values()))


_KINDS: tuple[Passed, ...] = ("window", "overlap", "fence")


class IdleWindowThrottle:
    """Implements `Throttle`, and forecasts windows from the marks of an iteration.

    The training thread calls `began`, `ended`, `step_began` and `boundary` (a few microseconds
    each).  Movers of bytes call the other methods.  `at_s`: the time of a mark that is reported
    later; None: now.
    """

    def __init__(
        self,
        *,
        bytes_per_s: float = UNKNOWN_BYTES_PER_S,
        margin: float = MARGIN,
        longest_wait_s: float = 1.0,
        chunks: tuple[int, ...] = CHUNKS,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        """`bytes_per_s`: of the mover alone, until its own pace is known.

        `chunks`: the sizes that it may be offered, bytes, the largest first.
        """
        self.longest_wait_s = longest_wait_s
        self.beside_bytes_per_s = math.inf
        """Highest rate beside the compute, even if the transfer is then late."""
        self._chunks = chunks
        self.use = WindowUse(chunk_bytes=chunks[0])
        self._forecast = IdleWindowForecast()
        self._margin = margin
        self._now_s = now_s
        self._lock = threading.RLock()  # entered by itself: a Condition does that in Python
        self._changed = threading.Condition(self._lock)
        self._waiting: list[int] = []
        """Bytes of each waiting thread."""
        self._sleep = sleep or self._changed.wait
        self._rates: deque[float] = deque(maxlen=MEMORY_RATES)
        """Of chunks that moved while the training stood still."""
        self._beside_rates: deque[float] = deque(maxlen=MEMORY_RATES)
        """Of chunks that moved beside the compute: slower, and the only ones without windows."""
        self._bytes_per_s = bytes_per_s
        """The median of the former, or of the latter while those are all; until then as given."""
        self._moving: dict[int, Move] = {}
        """By thread its last chunk: its next question tells how long that took."""
        self._busy_until_s = 0.0
        self._paid_at_s = 0.0
        self._left = 0
        self._rooms: list[int] = []
        """Bytes that the windows take from the n-th on; worked out once an iteration."""
        self._from: tuple[float, int, int] | None = None
        """Where this transfer began, as `_here` has it; None: it cannot tell what windows take."""
        self._kept: deque[float] = deque(maxlen=MEMORY_KEPT)
        """Fraction of the promised bytes that windows took, by transfer."""
        self._trust = 1.0
        """The fraction that nearly all transfers took; 1 before the first."""
        self._iterations_left = 1
        self._hurried = True
        """Nothing is known yet, or the fence waits."""

    # ------------------------------------------------------------------ the training thread

    def began(self, what: str, at_s: float | None = None) -> None:
        """A chunk of compute, or a collective, begins."""
        with self._lock:
            self._forecast.began(what, self._now_s() if at_s is None else at_s)

    def ended(self, what: str, at_s: float | None = None) -> None:
        """It ended."""
        with self._lock:
            now_s = self._now_s() if at_s is None else at_s
            self._forecast.ended(now_s)
            # Who is woken for nothing takes the interpreter's lock from the training.
            if self._waiting and self._news(now_s):
                self._changed.notify_all()

    def step_began(self, at_s: float | None = None) -> None:
        """The optimizer's step begins."""
        with self._lock:
            self._forecast.step_began(self._now_s() if at_s is None else at_s)

    def boundary(self, at_s: float | None = None) -> None:
        """The optimizer's step ended."""
        with self._lock:
            self._forecast.boundary(self._now_s() if at_s is None else at_s)
            self._rooms = []
            self._iterations_left = max(1, self._iterations_left - 1)
            self._changed.notify_all()

    def hurry(self) -> None:
        """A thread waits for the result: every chunk passes until the next `begin`."""
        with self._lock:
            if not self._hurried:
                self._take_stock(self._now_s())
            self._hurried = True
            self._changed.notify_all()

    def _news(self, now_s: float) -> bool:
        """Whether a waiting thread would now get another answer.

        Asked between all chunks: most gaps of a pipeline take none, and nothing is news there.
        """
        around_s = self._forecast.around_s
        if around_s and max(around_s) < self._least_s:
            return False
        return any(self._in_window(nbytes, now_s) for nbytes in self._waiting) or (
            self._left > self._trust * self._room(now_s)
        )

    # ------------------------------------------------------------------ the mover

    def hand_in(self, lengths_s: Mapping[int, float], fingerprint: str) -> None:
        """Lengths by window from a profile; refused by the first iteration of another order."""
        with self._lock:
            self._forecast.hand_in(lengths_s, fingerprint)

    @property
    def learned(self) -> bool:
        """Whether there are windows to count on."""
        return self._forecast.learned

    @property
    def refused(self) -> str:
        """Why a profile's windows were not used, "" if they were or there were none."""
        return self._forecast.refused

    @property
    def hurried(self) -> bool:
        """Whether every chunk passes: a thread waits, or there are no windows to wait for."""
        return self._hurried

    def iteration(self) -> tuple[float, list[tuple[float, float]]]:
        """(begin of this iteration, its windows that have closed), seconds of the clock."""
        with self._lock:
            now = self._forecast.now
            pairs = zip(now.opened_s, now.lengths_s, strict=True)
            return now.began_s, [(at_s, at_s + length_s) for at_s, length_s in pairs]

    def begin(self, nbytes: int, *, iterations: int = 1) -> WindowUse:
        """A transfer of `nbytes` begins, to be through within `iterations` iterations.

        Chooses the chunk size and whether to use windows at all; returns what becomes of it.
        """
        with self._lock:
            self._moving = {}
            self.use = use = WindowUse(nbytes=nbytes)
            self._left, self._iterations_left = nbytes, iterations
            self._paid_at_s = 0.0
            room = self._use_windows(nbytes / iterations)
            self._from = self._here(self._now_s()) if self._rates else None
            use.reason = self._not_worth(nbytes, iterations * room)
            self._hurried = bool(use.reason)
            return use

    def add(self, nbytes: int) -> None:
        """Another transfer joins the one that began, and shares its time."""
        with self._lock:
            self.use.nbytes += nbytes
            self._left += nbytes

    def moved(self) -> None:
        """This thread's last chunk is through, and its next one does not follow at once."""
        with self._lock:
            self._measure(self._now_s())

    @property
    def iteration_s(self) -> float:
        """Usual time of an iteration; infinite while none is known."""
        return self._forecast.iteration_s

    def wait(self, nbytes: int) -> float:
        """Blocks until `nbytes` fit into a window, must move beside compute, or time is up."""
        if nbytes <= 0:
            return 0.0
        with self._lock:
            start_s = now_s = self._now_s()
            self._measure(now_s)
            until_s = start_s + self.longest_wait_s
            while True:
                how, wait_s = self._judge(nbytes, now_s)
                if how is not None or now_s >= until_s:
                    break
                self._waiting.append(nbytes)
                self._sleep(min(wait_s, until_s - now_s))
                self._waiting.remove(nbytes)
                now_s = self._now_s()
            self._pass(nbytes, now_s, how or "overlap")
            # A wake-up is never on time to the microsecond; the contract is what was asked for.
            blocked_s = min(now_s - start_s, self.longest_wait_s)
            self.use.blocked_s += blocked_s
            return blocked_s

    # ------------------------------------------------------------------ decisions

    def _judge(self, nbytes: int, now_s: float) -> tuple[Passed | None, float]:
        """(how it passes now, or None; seconds until it is worth asking again)."""
        if self._hurried:
            return ("fence" if not self.use.reason else "overlap"), 0.0
        if how := self._in_window(nbytes, now_s):
            return how, 0.0
        excess = self._left - self._trust * self._room(now_s)
        if excess <= 0:
            return None, self.longest_wait_s
        if self._forecast.shortest_s:  # the longest windows were not enough
            self._take_stock(now_s)
            self._use_windows(math.inf)
            return self._judge(nbytes, now_s)
        if now_s >= self._paid_at_s:
            beside_s = (1 - self._margin) * self._beside_s(now_s)
            pace_s = max(beside_s / excess, 1 / self.beside_bytes_per_s)
            self._paid_at_s = now_s + nbytes * pace_s
            return "overlap", 0.0
        return None, self._paid_at_s - now_s

    def _in_window(self, nbytes: int, now_s: float) -> Passed | None:
        """How it passes in the window that is open; None: not in this one."""
        free_s = self._forecast.left_s(now_s) - max(0.0, self._busy_until_s - now_s)
        if self._takes_s(nbytes) * (1 + self._margin) <= free_s:
            return "window"
        if free_s > NEARLY_ALL * max(self._forecast.forecasts_s, default=math.inf):
            return "overlap"  # fits nowhere: it begins with the longest window at least
        return None

    def _pass(self, nbytes: int, now_s: float, how: Passed) -> None:
        self._left = max(0, self._left - nbytes)
        self._busy_until_s = max(now_s, self._busy_until_s) + self._takes_s(nbytes)
        self.use.passed[how] += nbytes
        move = Move(now_s, self._busy_until_s, nbytes, how)
        self._moving[threading.get_ident()] = move
        self.use.moves.append(move)
        if not self._left:
            self._take_stock(now_s)

    def _take_stock(self, now_s: float) -> None:
        """Record the share of promised bytes, once a transfer, when it needs no more windows.

        A window goes from chunk to chunk.  Its first part may be the training's own: its thread
        posts its results while the mover waits for the same core.
        """
        began, self._from = self._from, None
        if began is None or self.use.reason or self._forecast.now.astray:
            return
        self._rooms = []  # as fast as chunks are known to move by now
        promised = self._ahead(*began) - self._room(now_s)
        if promised > 0:
            self._remember(self.use.passed["window"] / promised)

    def _remember(self, kept: float) -> None:
        self._kept.append(min(1.0, kept))
        self._trust = nearly_all_had(self._kept)

    def _measure(self, now_s: float) -> None:
        """How fast this thread's last chunk moved: it asks for the next as soon as it is done.

        One smaller than any that is offered (a small tensor) sets no pace: its start is all it is.
        """
        move = self._moving.pop(threading.get_ident(), None)
        if move is None or now_s - move.began_s <= ALPHA_S:
            return
        move.ended_s = now_s
        if move.nbytes >= self._chunks[-1]:
            rates = self._beside_rates if move.how == "overlap" else self._rates
            rates.append(move.nbytes / (now_s - move.began_s))
            known = self._rates or self._beside_rates
            self._bytes_per_s = sorted(known)[len(known) // 2]

    def _takes_s(self, nbytes: int) -> float:
        return ALPHA_S + nbytes / self._bytes_per_s

    @property
    def _least_s(self) -> float:
        """The shortest window that takes a chunk of any size."""
        return (1 + self._margin) * self._takes_s(self._chunks[-1])

    def _filled(self, windows_s: Sequence[float], chunk: int) -> int:
        """Bytes that windows take, in whole chunks."""
        each_s = (1 + self._margin) * self._takes_s(chunk)
        return sum(int(window_s / each_s) for window_s in windows_s) * chunk

    def _room(self, now_s: float) -> int:
        """Bytes that the windows take which are left of the iterations this transfer has."""
        return self._ahead(*self._here(now_s))

    def _here(self, now_s: float) -> tuple[float, int, int]:
        """(seconds left of the window that is open, number of the next one, iterations left)."""
        return self._forecast.left_s(now_s), self._forecast.following, self._iterations_left

    def _ahead(self, left_s: float, following: int, iterations_left: int) -> int:
        chunk = self.use.chunk_bytes
        self._rooms = rooms = self._rooms or self._from_window_on(chunk)
        ahead = rooms[min(following, len(rooms) - 1)] + rooms[0] * (iterations_left - 1)
        return self._filled([left_s], chunk) + ahead

    def _from_window_on(self, chunk: int) -> list[int]:
        """[bytes of all windows, of all but the first, ..., 0]."""
        each_s = (1 + self._margin) * self._takes_s(chunk)
        taken = [int(window_s / each_s) * chunk for window_s in self._forecast.forecasts_s]
        return [*itertools.accumulate(reversed(taken), initial=0)][::-1]

    def _beside_s(self, now_s: float) -> float:
        """Time until the optimizer's step, windows apart: what overlaps is spread over it."""
        forecast = self._forecast
        end_s = (
            forecast.now.began_s
            + forecast.until_step_s
            - now_s
            + (self._iterations_left - 1) * forecast.iteration_s
        )
        return max(
            0.0, end_s - forecast.left_s(now_s) - sum(forecast.forecasts_s[forecast.following :])
        )

    def _use_windows(self, nbytes: float) -> int:
        """The longest windows that take so much in an iteration, or all; the bytes that they take.

        In a gap the host posts messages and prepares the next chunk, and the shorter the gap, the
        more of it that is.  In chunks of the largest size that fills them about as well as any.
        Asked in the boundary: most gaps of a pipeline are no windows, and are looked at once.
        """
        least_s, forecast = self._least_s, self._forecast
        forecast.leave_alone(0.0)
        windows_s = sorted((w for w in forecast.forecasts_s if w >= least_s), reverse=True)
        each_s = (1 + self._margin) * self._takes_s(self._chunks[0])
        taken = itertools.accumulate(int(w / each_s) * self._chunks[0] for w in windows_s)
        wanted = SPARE * nbytes / max(self._trust, 1e-9)
        enough = next((number for number, fill in enumerate(taken, 1) if fill >= wanted), None)
        if enough is not None:
            del windows_s[enough:]
            forecast.leave_alone(windows_s[-1])
        filled = [self._filled(windows_s, chunk) for chunk in self._chunks]
        good = NEARLY_ALL * max(filled)
        self.use.chunk_bytes, room = next(
            (chunk, fill) for chunk, fill in zip(self._chunks, filled, strict=True) if fill >= good
        )
        self._rooms = []
        return room

    def _not_worth(self, nbytes: int, room: int) -> str:
        """A sentence when windows, which promise `room`, do not help this transfer."""
        if not self._forecast.learned:
            return "no windows known yet: the first iterations show them"
        trust, least = self._trust, YIELD_SHARE * nbytes
        if trust * room >= least:
            return ""
        if room >= least:
            self._remember(1.0)  # in the end it is forgotten, and windows are tried again
            doubt = f"took {trust:.0%} of what they promised lately"
        else:
            doubt = f"longest {max(self._forecast.forecasts_s, default=0.0) * 1e3:.2f} ms"
        return (
            f"windows take {int(trust * room)} of {nbytes} bytes ({doubt}, the smallest "
            f"chunk needs {self._least_s * 1e3:.2f} ms): copied beside the compute"
        )
