"""`make bench-timeslice`: how late a thread wakes beside copies, with usual and with long slices.

As many ranks as there are cores, and twice as many: each waits for 4 ms, as for a device, works for
half a millisecond and waits again, while the copy thread copies 64 MiB in each trace of 32 waits.
Figures are milliseconds beyond the 4, over all waits of all ranks; the three ways take turns.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

from autockpt.executors.linux.memory import Arena
from autockpt.executors.linux.timeslice import ask_for_long_slices
from autockpt.executors.snapshot import copy_engine
from autockpt.executors.snapshot.copy_engine import CopyEngine, CopyJob, CopyTask, ProgressCounter
from benchmarks.harness import Row, parse, publish, quantile, row

WAYS = ("no copies", "usual slices", "long slices")
WAIT_S, WAITS, COPIED = 0.004, 32, 64 * 2**20
WORK = 15_000
"""Additions: half a millisecond."""


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--traces", type=int, default=6)
    args = parse(parser, rounds=1, traces=1)
    given = multiprocessing.get_context("fork").Process(target=_note_if_refused)
    given.start()
    given.join()
    rows: list[Row] = []
    cores = len(os.sched_getaffinity(0))
    for ranks in (cores, 2 * cores):
        late_ms: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                late_ms[way] += beside(way, ranks, args.traces)
        for way in WAYS:
            name = f"{way}, {ranks} ranks"
            rows += [
                row(name, "late, mean", late_ms[way], "ms", statistic=statistics.fmean),
                row(name, "late, p99", late_ms[way], "ms", statistic=lambda s: quantile(s, 0.99)),
            ]
    publish("timeslice", rows, settings=vars(args), smoke=args.smoke)


def _note_if_refused() -> None:
    if not ask_for_long_slices():
        print("this kernel gives no long slices (Linux 6.12 does): both ways with copies are one")


def beside(way: str, ranks: int, traces: int) -> list[float]:
    """Milliseconds by which the waits of all ranks were late."""
    context = multiprocessing.get_context("fork")
    late: Queue[list[float]] = context.Queue()
    together = context.Barrier(ranks)
    processes = [
        context.Process(target=_rank, args=(way, traces, together, late)) for _ in range(ranks)
    ]
    for process in processes:
        process.start()
    found = [ms for _ in processes for ms in late.get(timeout=120)]
    for process in processes:
        process.join(timeout=30)
    return found


def _rank(way: str, traces: int, together: Barrier, late: "Queue[list[float]]") -> None:
    if way == "usual slices":
        vars(copy_engine)["ask_for_long_slices"] = lambda: False
    source, slot = Arena.anonymous(COPIED), Arena.anonymous(COPIED)
    engine, counter = CopyEngine(), ProgressCounter(memoryview(bytearray(8)))
    job = CopyJob(end=COPIED, destination=slot.address, source=source.address, nbytes=COPIED)
    found: list[float] = []
    for trace in range(traces + 1):
        if trace == 1:
            together.wait(timeout=60)  # the first trace has touched the memory
            found.clear()
        if way != "no copies":
            engine.start(CopyTask(jobs=[job], publish=counter))
        for _ in range(WAITS):
            began = time.perf_counter()
            time.sleep(WAIT_S)
            found.append((time.perf_counter() - began - WAIT_S) * 1e3)
            sum(range(WORK))
        engine.wait()
    engine.close()
    late.put(found)


if __name__ == "__main__":
    main()
