"""A process that comes back: builds the job, attaches to a run, says how long its parts took.

    python -m benchmarks.contest.resume_probe RUN_DIRECTORY SHARD SIZE TOKENS THREADS

Before that, in the same process and of as many bytes: the plain direct read of the shard and the
plain copy in memory, each into memory that is faulted already and into memory that is new.  It ends
without a goodbye, so that the keeper keeps what it has for the next one.
"""

import ctypes
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.peers.ours import NEVER
from benchmarks.peers.rounds import drop_cache

THREADS = 2
"""As many as a restore uses."""
PIECE_BYTES = 8 * 2**20
_POPULATE_WRITE = 23


def main() -> None:
    """One answer on stdout."""
    run_directory, shard, size, tokens, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    job = Job(size, int(tokens))
    answer = {**plain(Path(shard)), **resume(job, run_directory)}
    answer["digests"] = job.digests()
    print(json.dumps(answer), flush=True)
    os.kill(os.getpid(), 9)


def plain(shard: Path) -> dict[str, float]:
    """Seconds of the plain moves."""
    nbytes = shard.stat().st_size // mmap.PAGESIZE * mmap.PAGESIZE
    source = memory(nbytes, faulted=True)
    taken = {"bytes": float(nbytes)}
    for name, faulted in (("faulted", True), ("new", False)):
        target = memory(nbytes, faulted=faulted)
        taken[f"copy_{name}_s"] = in_parallel(nbytes, _copier(source, target))
        target.close()
        drop_cache([shard])
        target = memory(nbytes, faulted=faulted)
        taken[f"read_{name}_s"] = read(shard, target, nbytes)
        target.close()
    drop_cache([shard])
    source.close()
    return taken


def memory(nbytes: int, *, faulted: bool) -> mmap.mmap:
    """Private memory, written once or never."""
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if faulted:
        made.madvise(_POPULATE_WRITE)
    return made


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _copier(source: mmap.mmap, target: mmap.mmap) -> Callable[[int, int], None]:
    here, there = _address(source), _address(target)

    def copy(start: int, stop: int) -> None:
        ctypes.memmove(there + start, here + start, stop - start)

    return copy


def read(path: Path, target: mmap.mmap, nbytes: int) -> float:
    """O_DIRECT, whole pages."""
    view = memoryview(target)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def piece(start: int, stop: int) -> None:
        while start < stop:
            start += os.preadv(fd, [view[start:stop]], start)

    try:
        return in_parallel(nbytes, piece)
    finally:
        view.release()
        os.close(fd)


def in_parallel(nbytes: int, work: Callable[[int, int], None]) -> float:
    """Seconds for all pieces, shared out among the threads."""

    def share(index: int) -> None:
        for start in range(index * PIECE_BYTES, nbytes, THREADS * PIECE_BYTES):
            work(start, min(start + PIECE_BYTES, nbytes))

    threads = [threading.Thread(target=share, args=(i,)) for i in range(THREADS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def resume(job: Job, run_directory: str) -> dict[str, Any]:
    """Attaches as a restarted script does; what of that was the restore itself."""
    import autockpt
    from autockpt.executors.restore import resume as parts
    from autockpt.values.goal import Goal, Pins

    found: dict[str, Any] = {}
    setattr(parts, "Resumed", _noting(parts.Resumed, found))  # noqa: B010 - a type, for mypy
    os.environ["AUTOCKPT_NO_PROFILE"] = "1"
    os.environ["AUTOCKPT_SAME_JOB"] = "1"
    pins = Pins(memory_interval_steps=NEVER, disk_interval_steps=NEVER, retune=False)
    began = time.perf_counter()
    autockpt.attach(
        model=job.model, optimizer=job.optimizer, run_dir=run_directory, goal=Goal(pins=pins)
    )
    attach_s = time.perf_counter() - began
    return {"attach_s": attach_s, **found}


def _noting(kind: Any, found: dict[str, Any]) -> Any:
    def make(**fields: Any) -> Any:
        found.update(source=fields["source"], step=fields["step"])
        if fields["source"]:
            found["restore_s"] = fields["read_s"] + fields["apply_s"]
        return kind(**fields)

    return make


if __name__ == "__main__":
    main()
