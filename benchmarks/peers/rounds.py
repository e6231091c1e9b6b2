"""What is measured of a contestant, inside its process: a round, and the check of a load.

A round is two segments of k iterations, one that begins with a checkpoint and one without, each
after one iteration that does not count.  Between them the checkpoint becomes durable and whatever
works in the background comes to rest, outside the times; its CPU seconds are counted to the end.

CPU seconds are those of everything but the training: the process and all that belongs to it, less
the training thread, plus what that thread spends in the contestant's calls.  Those of the training
itself vary by more, from one second to the next, than any checkpoint costs.  With more than one
compute thread the others of the training stay in, and their noise with them.
"""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.contract import Peer
from benchmarks.peers.processes import cpu_s, machine_busy_s, settle

SETTLE_S = 60.0
"""Read-back of a generation at a gentle pace takes seconds; nobody should need longer."""


def one_round(peer: Peer, k: int, *, save_first: bool, every: bool) -> dict[str, Any]:
    """Figures of a pair of segments; `every`: a checkpoint at each iteration of the first."""
    settle(peer.helpers(), SETTLE_S, peer.finished)
    if save_first:
        taken = segment(peer, k, saves=k if every else 1)
        bare = segment(peer, k, saves=0)
    else:
        bare = segment(peer, k, saves=0)
        taken = segment(peer, k, saves=k if every else 1)
    iteration = bare["total"] / k
    return {
        "ratio": taken["total"] / bare["total"],
        "total": taken["total"],
        "bare": bare["total"],
        "iteration": iteration,
        "stall": taken["stall"],
        "stall_share": taken["stall"] / iteration,
        "slowdown": (taken["total"] - taken["stall"]) / bare["total"],
        "iterations": taken["iterations"],
        "bare_iterations": bare["iterations"],
        "durable": taken["durable"],
        "cpu": taken["cpu"] - bare["cpu"],
        "foreign": max(taken["foreign"], bare["foreign"]),
        "settled": taken["settled"] and bare["settled"],
        **peer.extras(),
    }


def segment(peer: Peer, k: int, *, saves: int) -> dict[str, Any]:
    """k iterations; a checkpoint before each of the first `saves`, behind the one before it."""
    gc.collect()
    _iterate(peer, save_follows=saves > 0)
    helpers, settled, iterations = peer.helpers(), True, []
    calls = _Calls(peer)
    cpu, busy = _beside_training_s(helpers), machine_busy_s()
    whole = cpu_s(helpers)
    began, began_at = time.perf_counter(), time.monotonic()
    for i in range(k):
        iteration_began = time.perf_counter()
        if i < saves:
            calls.time(peer.save)
        peer.job.iterate()
        if i + 1 >= saves:
            calls.time(peer.boundary, stalls=False)
        iterations.append(time.perf_counter() - iteration_began)
    total = time.perf_counter() - began
    own, all_of_it = cpu_s(helpers) - whole, machine_busy_s() - busy
    stall = calls.stall_s()
    durable = 0.0
    if saves:
        durable = peer.wait() - began_at + fsync(peer.unsynced())
        settled = settle(helpers, SETTLE_S, peer.finished)
    cpu = _beside_training_s(helpers) - cpu + calls.cpu_s
    peer.tidy()
    return {
        "total": total, "iterations": iterations, "stall": stall, "durable": durable, "cpu": cpu,
        "foreign": max(0.0, all_of_it - own) / total, "settled": settled,
    }  # fmt: skip


def _iterate(peer: Peer, *, save_follows: bool = False) -> None:
    """A save stands in the place of the boundary: it is one right behind an optimizer's step."""
    peer.job.iterate()
    if not save_follows:
        peer.boundary()


def _beside_training_s(helpers: list[int]) -> float:
    return cpu_s(helpers) - time.thread_time()


class _Calls:
    """What the training thread spends in a contestant's calls, or is blocked by them."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._before = peer.stalled_s()
        self._seconds = 0.0
        self.cpu_s = 0.0
        peer.job.before_update = lambda: self.time(peer.join)

    def time(self, call: Callable[[], None], *, stalls: bool = True) -> None:
        """Runs it on the clocks; a boundary says itself how long it blocked (`stalled_s`)."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        call()
        self.cpu_s += time.thread_time() - cpu_began
        if stalls:
            self._seconds += time.perf_counter() - began

    def stall_s(self) -> float:
        """Since the start of the segment."""
        return self._seconds + self._peer.stalled_s() - self._before


def fsync(paths: list[Path]) -> float:
    """Seconds to make files durable that the system has left to the page cache."""
    began = time.monotonic()
    for path in paths:
        for one in [*path.rglob("*"), path] if path.is_dir() else [path]:
            fd = os.open(one, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    return time.monotonic() - began if paths else 0.0


def check(peer: Peer, k: int) -> dict[str, Any]:
    """Saves, trains on, loads into a zeroed state: exact, and how long the load took, cold."""
    peer.job.before_update = peer.join
    _iterate(peer, save_follows=True)
    before = peer.job.digests()
    peer.save()
    for _ in range(k):
        _iterate(peer)
    peer.wait()
    fsync(peer.unsynced())
    settle(peer.helpers(), SETTLE_S, peer.finished)
    peer.tidy()
    drop_cache(peer.files())
    peer.job.wipe()
    began = time.perf_counter()
    peer.load()
    load_s = time.perf_counter() - began
    after = peer.job.digests()
    torn = sorted(name for name in before if after.get(name) != before[name])
    return {"torn": torn, "load_s": load_s, "stored_bytes": stored_bytes(peer.files())}


def drop_cache(paths: list[Path]) -> None:
    """Takes files out of the page cache, so that a load reads the disk."""
    for path in _files(paths):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def stored_bytes(paths: list[Path]) -> int:
    """What stands on disk."""
    return sum(path.stat().st_size for path in _files(paths))


def _files(paths: list[Path]) -> list[Path]:
    return [
        one
        for path in paths
        for one in (path.rglob("*") if path.is_dir() else [path])
        if one.is_file() and not one.is_symlink()
    ]
