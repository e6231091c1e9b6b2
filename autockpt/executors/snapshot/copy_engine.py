"""Bytes of the live state -> a slot, in the background: one thread, pieces, a counter.

One copy thread of plain priority does all copies.  It copies contiguous host tensors by memcpy in
pieces of 4 MiB: the GIL is released, and Python is re-entered 180 times for 0.7 GB.  Many small
tensors take one batched call.  Measured beside training: more threads, pacing or a lower priority
all cost the training or the fence more.  A nice'd thread stays on a busy core: 50 ms became 400.
Long slices keep the copy out of the way of threads that wake for a moment (`timeslice.py`).  Stores
past the caches halve the cost of a copy on some machines (`memcpy_threshold.py`).  With a gate the
pieces move in the windows of the iteration in which the training idles
(`throttle/idle_windows.py`).
"""

import ctypes
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autockpt.executors.linux.memcpy_threshold import PIECE_BYTES
from autockpt.executors.linux.timeslice import ask_for_long_slices, give_way
from autockpt.executors.throttle.idle_windows import IdleWindowThrottle, WindowUse


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One step of a copy: a memcpy, a batch of tensors, or the wait for a device."""

    end: int
    """Prefix of the image that is complete after this job."""
    destination: int
    source: int
    nbytes: int
    tensors: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
    """(views of the slot, sources) when a plain memcpy cannot do it, or not well."""
    event: Any = None
    """A device's own copy is only waited for: an event, or a `device.GatedCopy`."""


class ProgressCounter:
    """64-bit counters in memory shared with the keeper, one a slot; aligned stores, no lock."""

    def __init__(self, view: memoryview, slot: int = 0) -> None:
        self._cells = view[: len(view) // 8 * 8].cast("Q")
        self.slot = slot

    def of(self, slot: int) -> "ProgressCounter":
        """The counter of another slot."""
        other = object.__new__(ProgressCounter)
        other._cells, other.slot = self._cells, slot
        return other

    def set(self, copied: int) -> None:
        """Publishes the copied prefix of the image."""
        self._cells[self.slot] = copied

    def get(self) -> int:
        """The copied prefix."""
        return self._cells[self.slot]


@dataclass(slots=True)
class CopyTask:
    """The copy of one snapshot."""

    jobs: list[CopyJob]
    publish: ProgressCounter
    gate: IdleWindowThrottle | None = None
    """Asked before each piece; a caller that waits for the copy makes it open."""
    use: WindowUse | None = None
    """Use of the bytes by the gate, whose `begin` was called."""
    first: list[CopyJob] = field(default_factory=list)
    """Host tensors beside a device's: done before anything is waited for, not published."""
    last: Callable[["CopyTask"], None] | None = None
    """Called on the copy thread when all is done or has failed; waiting callers wait for it too."""
    stream: Callable[[Callable[[int], None]], None] | None = None
    """Copies instead of the jobs, and says which prefix of the image was copied."""
    copied: float = 0
    """Prefix of the image; infinite at the end, however it ended."""
    first_done: bool = False
    error: BaseException | None = None
    ended_s: float = 0.0


class CopyEngine:
    """A thread that works through copies in order; the training thread waits for its own parts."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[CopyTask | None] = queue.SimpleQueue()
        self._newest = CopyTask(jobs=[], publish=ProgressCounter(memoryview(bytearray(8))))
        self._newest.copied = math.inf
        self._awaited: Callable[[], bool] | None = None
        self._reached = threading.Event()
        self._thread = threading.Thread(target=self._work, name="autockpt-copy", daemon=True)
        self._thread.start()

    def start(self, task: CopyTask) -> None:
        """Begins after all earlier tasks."""
        self._newest = task
        self._tasks.put(task)

    @property
    def busy(self) -> bool:
        """True while a copy is under way."""
        return self._newest.copied != math.inf

    @property
    def ended_s(self) -> float:
        """When the newest copy ended, CLOCK_MONOTONIC."""
        return self._newest.ended_s

    def wait(self) -> float:
        """Blocks until everything is done; seconds waited."""
        task = self._newest
        return self.wait_for(lambda: task.copied == math.inf)

    def wait_for(self, done: Callable[[], bool], *, hurry: bool = True) -> float:
        """Blocks until `done()`, which must become true with the copies; seconds waited.

        For one thread at a time.  `hurry`: nothing is held back for it any more.
        """
        if done():
            return 0.0
        began = time.monotonic()
        if hurry and self._newest.gate is not None:
            self._newest.gate.hurry()
        self._reached.clear()
        self._awaited = done
        while not done():  # asked again: it may have come true before anybody knew of the wait
            self._reached.wait(1.0)
            self._reached.clear()
        self._awaited = None
        return time.monotonic() - began

    def tell(self) -> None:
        """Has the waiting thread look again; called on the copy thread within a task."""
        self._tell()

    def close(self) -> None:
        """Ends the thread after the tasks under way."""
        self._tasks.put(None)
        self._thread.join(timeout=30)

    def _work(self) -> None:
        ask_for_long_slices()
        while (task := self._tasks.get()) is not None:
            try:
                run_jobs(task.first, None)
                task.first_done = True
                self._tell()
                if task.stream is not None:
                    task.stream(lambda end: self._went(task, end))
                    task.stream = None
                run_jobs(task.jobs, task.publish, lambda end: self._went(task, end), gate=task.gate)
            except BaseException as error:  # reported at the fence, the training goes on
                task.error = error
            self._end(task)

    def _end(self, task: CopyTask) -> None:
        task.ended_s = time.monotonic()
        task.jobs, task.first, task.first_done, task.stream = [], [], True, None
        try:
            if task.last is not None:
                task.last(task)
        except BaseException as error:  # the thread must live: every later fence waits for it
            task.error = error
        task.last, task.copied = None, math.inf  # it may hold the snapshot, and that a slot
        self._tell()

    def _went(self, task: CopyTask, end: int) -> None:
        task.copied = end
        self._tell()

    def _tell(self) -> None:
        awaited = self._awaited
        if awaited is not None and awaited():
            self._reached.set()


def run_jobs(
    jobs: list[CopyJob],
    publish: ProgressCounter | None,
    went: Callable[[int], None] = lambda end: None,
    *,
    gate: IdleWindowThrottle | None = None,
) -> None:
    """Copy in order, when `gate` lets it; a device's own copies are only waited for."""
    for job in jobs:
        if job.event is not None:
            job.event.synchronize()
        elif job.tensors is not None:
            _wait_for_turn(gate, job.nbytes)
            copy_tensors(*job.tensors)
        else:
            _memcpy(job, publish, gate)
        if publish is not None:
            publish.set(job.end)
        went(job.end)


def _wait_for_turn(gate: IdleWindowThrottle | None, nbytes: int) -> None:
    """Until the gate lets them pass, and the training has posted what it still had to post.

    A window opens when a chunk ends.  Where cores are short, the copy thread that woke for it had
    the core for milliseconds.  Only then was the chunk's result sent to the waiting rank.
    """
    if gate is not None:
        gate.wait(nbytes)
        if not gate.hurried:
            give_way()


def copy_tensors(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """One call for all of them: hundreds of optimizer steps of 4 bytes are 0.05 ms."""
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)


def _memcpy(job: CopyJob, publish: ProgressCounter | None, gate: IdleWindowThrottle | None) -> None:
    start = job.end - job.nbytes
    piece = PIECE_BYTES if gate is None else gate.use.chunk_bytes
    for done in range(0, job.nbytes, piece):
        count = min(piece, job.nbytes - done)
        _wait_for_turn(gate, count)
        ctypes.memmove(job.destination + done, job.source + done, count)
        if publish is not None:
            publish.set(start + done + count)
