"""`make bench-copies`: memcpy through the caches and past them.

Two ways take turns, each in a process of its own because glibc reads its bound once: as glibc
decides by itself, and with the bound that `autockpt run` sets where copies are clearly faster with
it (`executors/linux/memcpy_threshold.py`).

**Copy**: GB/s of 256 MiB (`--mib`) in pieces of one size, into memory that was touched before.
**Digest after a copy**: GB/s of the digest of the same bytes, which may come from a cache or not.
**Lost beside it**: milliseconds that products of matrices on another core take longer for each GB
that is copied meanwhile; a machine with one core has none.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
import xxhash

from autockpt.executors.linux import memcpy_threshold
from autockpt.executors.linux.memcpy_threshold import PIECE_BYTES
from autockpt.executors.linux.memory import Arena
from autockpt.profiles.probes.copies import copy
from benchmarks.harness import Row, parse, publish, row

USUAL, PAST = "glibc by itself", "past the caches"
PIECES_BYTES = tuple(2**20 * n // 4 for n in (1, 2, 4, 16, 256))
LOST = "lost beside it"


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256, help="copied at a time")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parse(parser, rounds=1, mib=8)
    if args.one:
        print(json.dumps(measure(args.mib * 2**20)))
        return
    bare = {k: v for k, v in os.environ.items() if k != memcpy_threshold.VARIABLE}
    ways = {USUAL: bare, PAST: bare | memcpy_threshold.with_threshold(bare)}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, environ in ways.items():
            command = [sys.executable, "-m", "benchmarks.copies", "--one", "--mib", str(args.mib)]
            done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
            found[way].append(json.loads(done.stdout))
    settings = {
        "rounds": args.rounds,
        "mib": args.mib,
        "bound_bytes": memcpy_threshold.threshold_bytes(),
    }
    publish("copies", rows_of(found), settings=settings, smoke=args.smoke)


def rows_of(found: dict[str, list[dict[str, float]]]) -> list[Row]:
    """Each figure of both ways, and their ratio in the same round."""
    rows = []
    for figure in found[USUAL][0]:
        usual, past = ([each[figure] for each in found[way]] for way in (USUAL, PAST))
        unit = "ms/GB" if figure == LOST else "GB/s"
        rows += [row(USUAL, figure, usual, unit), row(PAST, figure, past, unit)]
        if figure == LOST:
            continue  # nothing is lost where cores share nothing, and a ratio to that says nothing
        ratios = [new / old for new, old in zip(past, usual, strict=True)]
        rows.append(row("ratio", figure, ratios, "x"))
    return rows


def measure(nbytes: int) -> dict[str, float]:
    """GB/s of this process."""
    source, target = (Arena.anonymous(nbytes) for _ in range(2))
    for arena in (source, target):
        ctypes.memset(arena.address, 1, nbytes)
    found = {
        f"copy, pieces of {size // 1024} KiB": rate(nbytes, partial(copied, source, target, size))
        for size in PIECES_BYTES
    }
    found["digest after a copy"] = rate(
        nbytes,
        partial(xxhash.xxh3_128_intdigest, target.view),
        before=partial(copied, source, target, PIECE_BYTES),
    )
    if len(cores := sorted(os.sched_getaffinity(0))) > 1:
        found[LOST] = lost_beside(nbytes, partial(copied, source, target, PIECE_BYTES), cores)
    return found


def lost_beside(nbytes: int, work: Callable[[], None], cores: list[int]) -> float:
    """ms of another core's products for each GB that `work` copies beside them, `nbytes` a call."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {cores[0]})
    quiet_s = products_s()
    done, copies = threading.Event(), 0

    def beside() -> None:
        nonlocal copies
        os.sched_setaffinity(0, {cores[1]})
        while not done.is_set():
            work()
            copies += 1

    thread = threading.Thread(target=beside)
    began = time.perf_counter()
    thread.start()
    beside_s = products_s()
    done.set()
    thread.join()
    gb_per_s = copies * nbytes / 1e9 / (time.perf_counter() - began)
    return (1 - quiet_s / beside_s) * 1e3 / gb_per_s


def products_s(times: int = 60) -> float:
    """Median seconds of eight products, of as many weights as a pipeline's stage may have."""
    weights, rows = torch.randn(8, 1024, 1024), torch.randn(64, 1024)
    took = []
    for _ in range(times):
        began = time.perf_counter()
        for weight in weights:
            torch.mm(rows, weight)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def copied(source: Arena, target: Arena, piece: int) -> None:
    """Copies everything in pieces."""
    copy(source.address, target.address, source.nbytes, piece)


def rate(
    nbytes: int,
    work: Callable[[], object],
    *,
    before: Callable[[], object] = lambda: None,
    times: int = 8,
) -> float:
    """Median GB/s of something that is done to all bytes, each time after `before`."""
    took = []
    for _ in range(times):
        before()
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return nbytes / statistics.median(took) / 1e9


if __name__ == "__main__":
    main()
