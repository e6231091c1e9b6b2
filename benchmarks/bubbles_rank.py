"""One rank of `benchmarks.bubbles`: trains, checkpoints in turn in several ways, writes figures.

    python -m benchmarks.bubbles_rank RANK OUT.json SETTINGS.json

Blocks of iterations with a checkpoint of every iteration alternate with blocks without, in an order
that is drawn anew each round and is the same on all ranks.  The pace of a shared machine drifts
within seconds, so blocks are short and each one is compared with both of its neighbours.
"""

import ctypes
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from autockpt.executors.linux.memory import Arena
from autockpt.executors.linux.timeslice import ask_for_long_slices
from autockpt.executors.snapshot.copy_plan import slot_tensor
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.state.live_state import LiveState, local_part
from autockpt.executors.throttle.idle_windows import IdleWindowThrottle, WindowUse
from autockpt.profiles import windows
from autockpt.profiles.pipeline import STEADY_AFTER
from autockpt.profiles.probes.windows.iteration_trace import TraceRecorder
from autockpt.profiles.probes.windows.pipeline_hooks import StageHooks
from autockpt.profiles.probes.windows.pipeline_orders import orders_of
from autockpt.profiles.samples import TraceSample
from benchmarks.pipeline_job import PipelineJob, Shape, transfer_s

WAYS = ("control", "bare", "blocking", "async", "lazy", "windows")
WARM = 8
"""Iterations before anything counts: the windows are learned in them."""
SLOTS = 2
Took = tuple[float, float]
"""What `Rank.block` gives."""
TIMES = {"windows": 4}
"""Blocks a round, where it is not one: what has a target is told more exactly."""


class Pauses:
    """What a rank's host does between its chunks: the time that passes, less waits for messages."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self.traces: list[tuple[float, ...]] = []
        """Of each iteration, seconds before each chunk and before the optimizer's step."""
        self.hand_overs_s: list[float] = []
        """From the end of a chunk until its message was on its way."""
        self._trace: list[float] = []
        self._since_s, self._waited_s = now_s(), 0.0

    def hear_messages(self) -> None:
        """Wraps the two functions of torch's schedules that post messages and wait for them."""
        post, wait = schedules._batch_p2p, schedules._wait_batch_p2p

        def posted(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
            work = post(p2p_ops, desc)
            if any(op.op is dist.isend for op in p2p_ops):
                self.hand_overs_s.append(self._now_s() - self._since_s)
            return work

        def waited(work: list[dist.Work]) -> None:
            began_s = self._now_s()
            wait(work)
            self._waited_s += self._now_s() - began_s

        schedules._batch_p2p, schedules._wait_batch_p2p = posted, waited

    def computes(self) -> None:
        """A chunk begins, or the optimizer's step."""
        self._trace.append(self._now_s() - self._since_s - self._waited_s)

    def goes_on(self) -> None:
        """It ended."""
        self._since_s, self._waited_s = self._now_s(), 0.0

    def boundary(self) -> None:
        """The iteration ended."""
        self.traces.append(tuple(self._trace))
        self._trace = []
        self.goes_on()


class Bare:
    """A thread that copies and does nothing else, all at once: the least that windows can cost."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, int]] = []
        self._wait_for, self._heard = 0, 0
        self._go, self._copied = threading.Event(), threading.Event()
        self._copied.set()
        threading.Thread(target=self._work, daemon=True).start()

    def begin(self, pieces: list[tuple[int, int, int]], after: int) -> None:
        """At the boundary: (destination, source, bytes) to copy when so many chunks have ended."""
        self._copied.clear()
        self._pieces, self._wait_for, self._heard = pieces, after, 0
        if not after:
            self._go.set()

    def ended(self) -> None:
        """A chunk of compute ended."""
        self._heard += 1
        if self._heard == self._wait_for:
            self._go.set()

    def fence(self) -> None:
        """Until everything is copied; where the gap has not come, now."""
        if self._heard < self._wait_for:
            self._heard = self._wait_for
            self._go.set()
        self._copied.wait()

    def _work(self) -> None:
        ask_for_long_slices()
        while self._go.wait():
            self._go.clear()
            for piece in self._pieces:
                ctypes.memmove(*piece)
            self._copied.set()


class Marks:
    """Hands every chunk to the recorder and to the gate."""

    def __init__(self) -> None:
        self.recorder, self.gate, self.pauses = TraceRecorder(), IdleWindowThrottle(), Pauses()
        self.bare = Bare()
        self.mark_s: list[float] = []
        """What each mark took the training thread, the gate's part."""

    def began(self, what: str) -> None:
        """A chunk begins."""
        self.pauses.computes()
        self.recorder.began(what)
        self._timed(lambda: self.gate.began(what))

    def ended(self, what: str) -> None:
        """It ended."""
        self.recorder.ended(what)
        self.pauses.goes_on()
        self._timed(lambda: self.gate.ended(what))
        self.bare.ended()

    def step_began(self) -> None:
        """The optimizer's step begins."""
        self.pauses.computes()
        self.recorder.step_began()
        self.gate.step_began()

    def boundary(self) -> None:
        """It ended."""
        self.pauses.boundary()
        self.recorder.boundary()
        self._timed(self.gate.boundary)

    def _timed(self, mark: Callable[[], None]) -> None:
        began = time.perf_counter()
        mark()
        self.mark_s.append(time.perf_counter() - began)


class Rank:
    """The training of one rank, and the ways to checkpoint it."""

    def __init__(self, rank: int, shape: Shape) -> None:
        self.rank, self.shape = rank, shape
        self.job, self.marks = PipelineJob(shape, rank), Marks()
        self.hooks = StageHooks(self.marks)
        self.hooks.attach()
        self.marks.pauses.hear_messages()
        self.state = LiveState.of(model=self.job.model, optimizer=self.job.optimizer)
        self.snapshotter = Snapshotter(self.state, memoryview(bytearray(8 * SLOTS)))
        self.slots: list[Arena] = []
        self.pieces: dict[Arena, list[tuple[int, int, int]]] = {}
        self.pool = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None
        self.uses: list[WindowUse] = []
        self.updates_s: list[float] = []
        """What the optimizer took, iteration by iteration."""
        self.step = 0
        self.longest_after: int | None = None
        """Chunks before this rank's longest gap, where bare copies begin."""

    def iterate(self, way: str) -> None:
        """One iteration, and the checkpoint of its end."""
        self.job.compute()
        self.marks.step_began()
        self._fence()
        began = time.perf_counter()
        self.job.update()
        self.updates_s.append(time.perf_counter() - began)
        self.marks.boundary()
        self.step += 1
        self._checkpoint(way)

    def _fence(self) -> None:
        changed = self.snapshotter.fence(self.job.optimizer)
        assert not changed, changed
        if self.pending is not None:
            self.pending.result()
            self.pending = None
        self.marks.bare.fence()

    def _checkpoint(self, way: str) -> None:
        if way in ("none", "control"):
            return
        if not self.slots:
            layout = self.snapshotter.plan({"step": self.step})
            self.slots = [Arena.anonymous(layout.image_bytes + 2**16) for _ in range(SLOTS)]
        arena = self.slots[self.step % SLOTS]
        if way == "async":
            self.pending = self.pool.submit(self._copy_all, arena)
            return
        if way == "bare":
            self._copy_bare(arena)
            return
        self.snapshotter.gate = self.marks.gate if way == "windows" else None
        self.snapshotter.begin(arena, {"step": self.step}, lazy=way != "blocking")
        if way == "windows":
            self.uses.append(self.marks.gate.use)

    def _copy_all(self, arena: Arena) -> None:
        """Every tensor at once, by torch's own copy: what a plain background thread does."""
        with torch.no_grad():
            for target, source in self._pairs(arena):
                target.copy_(source)

    def _copy_bare(self, arena: Arena) -> None:
        """The same bytes in the longest gap.  What to copy is looked up here, once a slot."""
        if self.longest_after is None:
            gaps = windows.device_bubbles(self.marks.recorder.samples, rank=self.rank)
            self.longest_after = max(gaps, key=lambda gap: gap.length_s.p50).after
        if arena not in self.pieces:
            self.pieces[arena] = [
                (target.data_ptr(), source.data_ptr(), source.nbytes)
                for target, source in self._pairs(arena)
            ]
        self.marks.bare.begin(self.pieces[arena], self.longest_after)

    def _pairs(self, arena: Arena) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(place in the slot, tensor) of all that may be copied after the boundary."""
        assert self.snapshotter.layout is not None
        tensors = self.state.lazy_tensors()
        return [
            (slot_tensor(arena, entry), local_part(tensors[entry.spec.name]))
            for entry in self.snapshotter.layout.entries
            if entry.spec.lazy and entry.spec.nbytes
        ]

    def block(self, way: str, iterations: int) -> tuple[float, float]:
        """Median seconds of an iteration, and of the optimizer in it; the first does not count.

        The median, because a shared machine takes a core away now and then, for much longer than
        what is measured; a checkpoint is in every iteration.
        """
        dist.barrier()
        self.marks.pauses.goes_on()
        self.iterate(way)
        self.updates_s.clear()
        took = []
        for _ in range(iterations):
            began = time.perf_counter()
            self.iterate(way)
            took.append(time.perf_counter() - began)
        self._fence()
        return statistics.median(took), statistics.median(self.updates_s)

    def proven(self) -> bool:
        """Whether a checkpoint taken in windows is equal to the state, byte by byte."""
        self._checkpoint("windows")
        arena = self.slots[self.step % SLOTS]
        self.job.compute()
        self._fence()
        return all(torch.equal(copied, source) for copied, source in self._pairs(arena))


def outside_compute(use: WindowUse, traces: list[TraceSample], began_s: list[float]) -> float:
    """Fraction of a transfer's bytes that moved while this rank computed nothing, by the clock."""
    busy = [
        (at + begin, at + end)
        for at, trace in zip(began_s, traces, strict=True)
        for begin, end in trace.spans
    ]
    free = 0.0
    for move in use.moves:
        length = max(1e-9, move.ended_s - move.began_s)
        overlap = sum(
            max(0.0, min(end, move.ended_s) - max(begin, move.began_s)) for begin, end in busy
        )
        free += move.nbytes * max(0.0, 1.0 - overlap / length)
    return free / max(1, sum(move.nbytes for move in use.moves))


def main() -> None:
    """Trains and writes the result."""
    rank, out, given = (
        int(sys.argv[1]),
        Path(sys.argv[2]),
        json.loads(Path(sys.argv[3]).read_text()),
    )
    torch.set_num_threads(1)
    shape = Shape(**given["shape"])
    dist.init_process_group("gloo", rank=rank, world_size=shape.ranks)
    me = Rank(rank, shape)
    result = measure(me, given["ways"], given["rounds"], given["iterations"])
    out.write_text(json.dumps(result))
    dist.barrier()
    me.snapshotter.close()
    me.pool.shutdown()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a normal end


def measure(me: Rank, ways: list[str], rounds: int, iterations: int) -> dict[str, Any]:
    """Blocks in turn, then the layout of the quiet ones."""
    recorder = me.marks.recorder
    for _ in range(WARM):
        me.iterate("none")
    for way in ways:
        me.block(way, 1)
    transfer = transfer_s(me.rank, me.shape.ranks, me.job.message_bytes)
    quiet: list[list[TraceSample]] = []
    blocks: list[tuple[str, Took, Took, Took]] = []
    pauses_s: list[list[tuple[float, ...]]] = []
    hand_overs_s: list[float] = []
    shares: list[float] = []
    drawn = [way for way in ways for _ in range(TIMES.get(way, 1))]
    order = random.Random(0)

    def without() -> Took:
        """A block without checkpoints, recorded."""
        recorder.samples.clear()
        me.marks.pauses.traces.clear()
        me.marks.pauses.hand_overs_s.clear()
        took = me.block("none", iterations)
        quiet.append(list(recorder.samples))
        pauses_s.append(list(me.marks.pauses.traces))
        hand_overs_s.extend(me.marks.pauses.hand_overs_s)
        return took

    before = without()
    for _ in range(rounds):
        for way in order.sample(drawn, len(drawn)):
            recorder.samples.clear()
            me.uses.clear()
            began = time.perf_counter()
            took = me.block(way, iterations)
            if way == "windows":
                starts = _trace_starts(recorder, began)
                shares += [outside_compute(u, recorder.samples, starts) for u in me.uses[1:-1]]
            after = without()
            blocks.append((way, took, before, after))
            before = after
    return {
        **_summary(me, [trace for block in quiet for trace in block[STEADY_AFTER:]]),
        "transfer_s": transfer,
        "quiet": [[asdict(trace) for trace in block] for block in quiet],
        "pauses_s": pauses_s,
        "hand_overs_s": hand_overs_s,
        "blocks": blocks,
        "shares": shares,
        "proven": me.proven(),
    }


def _trace_starts(recorder: TraceRecorder, began_s: float) -> list[float]:
    """When each recorded trace began: they follow each other, and the last ended just now."""
    end = recorder._began
    starts = []
    for sample in reversed(recorder.samples):
        end -= sample.iteration_s
        starts.append(end)
    return starts[::-1]


def _summary(me: Rank, quiet: list[TraceSample]) -> dict[str, Any]:
    trace = windows.trace(quiet, rank=me.rank, schedule=me.shape.schedule)
    marks = sorted(me.marks.mark_s)
    return {
        "rank": me.rank,
        "order": [str(action) for action in orders_of(me.hooks.schedule)[me.rank]],
        "iteration_s": trace.iteration_s.p50,
        "probe_overhead": trace.overhead,
        "mark_us_p50": marks[len(marks) // 2] * 1e6,
        "reason": me.marks.gate.use.reason,
    }


if __name__ == "__main__":
    main()
