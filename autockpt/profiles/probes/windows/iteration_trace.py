"""Iterations as a rank runs them: begin and end of each chunk between two optimizer steps.

On a host marks are readings of the monotonic clock.  On a GPU they are events on the current
(compute) stream, read one iteration late to avoid waiting for the device.  The training thread's
enqueues ahead of it do not show.  A receive spins on the device, so utilisation is meaningless.  A
gap is the begin of a chunk minus the end of the previous one.
"""

import time
from typing import Any

from autockpt.profiles.probes.iteration import HostTicker, Ticker
from autockpt.profiles.samples import TraceSample


class TraceRecorder:
    """Hears chunks (`stages.ChunkListener`) and optimizer steps; samples of whole iterations.

    All methods run on the training thread.  `step_began` before the fence, so that a wait there is
    part of the step and not of a gap; `boundary` when the step has ended.
    """

    def __init__(self, ticker: Ticker | None = None) -> None:
        self.ticker = ticker or HostTicker()
        self.samples: list[TraceSample] = []
        self._began: Any = None
        self._step: Any = None
        self._marks: list[tuple[str, Any, Any]] = []
        self._open: tuple[str, Any] | None = None
        self._late: list[tuple[Any, Any, Any, list[tuple[str, Any, Any]], float]] = []
        self._probe_s = 0.0

    def began(self, what: str) -> None:
        """A chunk begins."""
        entered = time.perf_counter()
        self._open = (what, self.ticker.mark())
        self._probe_s += time.perf_counter() - entered

    def ended(self, what: str) -> None:
        """It ended."""
        entered = time.perf_counter()
        if self._open is not None and self._open[0] == what:
            self._marks.append((what, self._open[1], self.ticker.mark()))
        self._open = None
        self._probe_s += time.perf_counter() - entered

    def step_began(self) -> None:
        """The optimizer's step begins; of several in an iteration the first counts."""
        if self._step is None:
            self._step = self.ticker.mark()

    def boundary(self) -> None:
        """The iteration ended; the next begins."""
        entered = time.perf_counter()
        now = self.ticker.mark()
        if not self.ticker.late:
            self._keep(now)
        self.flush()
        if self.ticker.late:
            self._keep(now)
        self._began, self._step, self._marks = now, None, []
        self._probe_s = time.perf_counter() - entered

    def flush(self) -> None:
        """Read the marks that are due; on a device wait for the last iteration's marks."""
        between = self.ticker.between
        for began, step, ended, marks, probe_s in self._late:
            self.samples.append(
                TraceSample(
                    marks=tuple(what for what, _, _ in marks),
                    spans=tuple((between(began, a), between(began, b)) for _, a, b in marks),
                    step_s=between(began, step), iteration_s=between(began, ended), probe_s=probe_s,
                )
            )  # fmt: skip
        self._late = []

    def _keep(self, now: Any) -> None:
        if self._began is not None:
            step = now if self._step is None else self._step
            self._late.append((self._began, step, now, self._marks, self._probe_s))
