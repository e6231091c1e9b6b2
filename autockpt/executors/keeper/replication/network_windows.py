"""Copies leave while the network of this node's training idles, as the trainer's marks show.

One `IdleWindowThrottle` serves the link, fed with the marks of one rank, because ranks of a node
meet in the same collectives.  Transfers that overlap share it.  If windows are unknown or take too
little, or marks stop, the remaining bytes leave at the plan's rate.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autockpt.executors.keeper.client.traffic_marks import Kind, MarkReader
from autockpt.executors.keeper.slots import CELL_SPREAD, RankMemory
from autockpt.executors.throttle.idle_windows import CHUNKS, IdleWindowThrottle, WindowUse
from autockpt.executors.throttle.rate_limit import RateLimiter, Throttle, Unlimited

LONGEST_WAIT_S = 1.0
"""The longest wait for one piece."""
BUSY_S, IDLE_S = 250e-6, 20e-3
"""Between two looks at the marks: while something moves, and while windows are only learned."""
SILENT_S, SILENT_ITERATIONS = 1.0, 3.0
"""A trainer that has marked nothing for so long, and so many iterations, stands still."""


class LinkWindows:
    """The windows of one trainer (`gate.Windows`); used by the threads of transfers."""

    def __init__(
        self,
        board: memoryview,
        rate: Callable[[], float],
        told: Callable[[WindowUse, float], None],
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        """`rate()`: bytes per second that may leave beside the training's traffic, 0: no limit.

        `told(use, seconds)`: what became of transfers that went together, on one of their threads.
        """
        self.board = board
        self._marks, self._now_s = MarkReader(board, now_s), now_s
        self._rate, self._told = rate, told
        self._gate = IdleWindowThrottle(longest_wait_s=LONGEST_WAIT_S, now_s=now_s, sleep=sleep)
        self._beside: Throttle = Unlimited()
        self._lock = threading.Lock()
        self._active, self._began_s, self._heard_s = 0, 0.0, now_s()
        self._wake, self._closed = threading.Event(), False

    def listen(self) -> None:
        """Hears marks on a thread of its own until it is closed."""
        threading.Thread(target=self._listen, name="autockpt-marks", daemon=True).start()

    def close(self) -> None:
        """Stop reading marks: transfers under way go on at the plan's rate."""
        self._closed = True

    def hear(self) -> None:
        """Takes in what the trainer has marked since."""
        with self._lock:
            gate = self._gate
            for mark in self._marks.read():
                self._heard_s = mark.at_s
                match mark.kind:
                    case Kind.BEGAN:
                        gate.began(mark.what, mark.at_s)
                    case Kind.ENDED:
                        gate.ended(mark.what, mark.at_s)
                    case Kind.STEP_BEGAN:
                        gate.step_began(mark.at_s)
                    case Kind.BOUNDARY:
                        gate.boundary(mark.at_s)

    @contextmanager
    def begin(self, nbytes: int) -> Iterator["LinkWindows"]:
        """A transfer of `nbytes`; the gate is the link's own."""
        self.hear()
        with self._lock:
            if self._active:
                self._gate.add(nbytes)
            else:
                self._start(nbytes)
            self._active += 1
            self._wake.set()
        try:
            yield self
        finally:
            self._gate.moved()
            with self._lock:
                self._active -= 1
                use, seconds = self._gate.use, self._now_s() - self._began_s
                if not self._active:
                    self._wake.clear()
                    self._told(use, seconds)

    def take(self, left: int) -> int:
        """Blocks until some of `left` bytes may move; how many."""
        gate = self._gate
        gate.moved()
        use = gate.use
        use.reason = use.reason or self._trouble()
        piece = min(left, CHUNKS[0] if use.reason else use.chunk_bytes)
        if use.reason:
            gate.hurry()
            self._beside.wait(piece)
        gate.wait(piece)
        return piece

    def _start(self, nbytes: int) -> None:
        rate = self._rate()
        self._began_s = self._now_s()
        self._beside = RateLimiter(rate, longest_wait_s=LONGEST_WAIT_S) if rate else Unlimited()
        self._gate.beside_bytes_per_s = rate or float("inf")
        self._gate.begin(nbytes, iterations=max(1, self._marks.spread))

    def _trouble(self) -> str:
        """Why windows can not be counted on any more, "" if they can."""
        silent_s = self._now_s() - self._heard_s
        if not self._marks.spread or self._closed:
            return "the trainer does not say any more when its network idles"
        if not self._gate.learned:
            return "the traffic of the training has another order now"
        if silent_s > max(SILENT_S, SILENT_ITERATIONS * self._gate.iteration_s):
            return "the training stands still"
        return ""

    def _listen(self) -> None:
        while not self._closed:
            if self._wake.wait(IDLE_S):
                time.sleep(BUSY_S)
            self.hear()


class NodeWindows:
    """The windows by which this node's copies go now; belongs to the keeper's loop."""

    def __init__(self, rate: Callable[[], float], told: Callable[[WindowUse, float], None]) -> None:
        self._rate, self._told = rate, told
        self._current: LinkWindows | None = None

    def of(self, memory: RankMemory | None) -> LinkWindows | None:
        """The windows of a rank's trainer; None if it does not mark its traffic."""
        board = None
        if memory is not None and memory.cell(CELL_SPREAD) and memory.board is not None:
            board = memory.board.view
        current = self._current
        if current is not None and current.board is not board:
            current.close()
            self._current = None
        if self._current is None and board is not None:
            self._current = LinkWindows(board, self._rate, self._told)
            self._current.listen()
        return self._current
