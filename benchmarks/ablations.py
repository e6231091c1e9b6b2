"""`make bench-ablations`: what each mechanism of the published systems gains by itself.

Every comparison is one preset against another that differs by its mechanism alone (`autockpt policy
diff`), or the same calls with and without the mechanism; contestants take turns, round after round.

* stall: `dlrover` against `sync` (DLRover: a blocking copy instead of a blocking write)
* snapshot: preallocated slots against fresh memory (EasyCkpt), beside the machine's own first touch
* added training time: `datastates` against `async` (DataStates-LLM)
* pipeline: digest + encode against write, and read against decode, at once or one after the other
  (ByteCheckpoint), on a store as slow as the rest
* writers: `fastpersist` against one writer through the page cache (FastPersist)
* in flight: `pccheck` against `checkfreq` on storage slower than the interval (PCcheck)

`--smoke` takes a model of 1 M parameters and one round.
"""

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.ablation import in_flight, memory, presets, stages, writers
from benchmarks.ablation.figures import gain, without_one
from benchmarks.harness import Row, parse, publish, row
from benchmarks.job import Job

COMPARED = ("sync", "async", "dlrover", "datastates")
BESIDE = ("easyckpt", "fastpersist", "bytecheckpoint-pipeline")
"""Measured without a target of their own, and not with --smoke."""
STALL, FIRST_TOUCH, ADDED = 10.0, 7.6, 0.74
"""Published: DLRover on NVMe, EasyCkpt, DataStates-LLM."""
SAVE, LOAD, BOUND_SHARE, BOUND = 1.45, 1.5, 0.9, 1.8
"""ByteCheckpoint's figures; the share of sum / max of the stages; how far the store is off 2."""
IN_FLIGHT = 2.0
"""With 3 in flight and saves of 2.5 intervals, 2.5 are possible."""


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--size", default="60m", help="of the example's model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--write-mib", type=int, default=512, help="of a write at least: fewer measure calls"
    )
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--only", nargs="*", choices=sorted(PARTS), help="parts to measure")
    args = parse(parser, size="1m", rounds=1, write_mib=16)
    torch.set_num_threads(args.threads)
    folder = Path(tempfile.mkdtemp(prefix="bench-ablations-", dir=os.getcwd()))
    job = Job(args.size, 96)
    for _ in range(3):
        job.iterate()
    settings: dict[str, Any] = {
        "size": args.size, "rounds": args.rounds, "compute_threads": args.threads,
        "state_bytes": sum(tensor.nbytes for tensor in job.tensors()),
    }  # fmt: skip
    rows: list[Row] = []
    try:
        for name in args.only or PARTS:
            rows += PARTS[name](job, folder, args, settings)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish("ablations", rows, settings=settings, smoke=args.smoke)


def training(
    job: Job, folder: Path, args: argparse.Namespace, settings: dict[str, Any]
) -> list[Row]:
    """Stall, snapshot and added time of the presets, in turn on one training."""
    every = 4
    names = COMPARED if args.smoke else (*COMPARED, *BESIDE)
    taken = presets.measure(job, folder, names, rounds=args.rounds, every=every)
    fresh, faulted = memory.first_touch(settings["state_bytes"], args.rounds)
    machine = [a / b for a, b in zip(fresh, faulted, strict=True)]
    added, spread = without_one(
        [s.added_s for s in taken["datastates"]], [s.added_s for s in taken["async"]]
    )
    settings["checkpoint_every_iterations"] = every
    settings["iteration_s"] = presets.iteration_s(taken)
    return [
        *presets.rows_of(taken),
        gain("stall, sync / dlrover", _stalls(taken, "sync", "dlrover"), at_least=STALL),
        gain("first touch of this machine, fresh / faulted", machine),
        gain(
            "snapshot, async / dlrover", _stalls(taken, "async", "dlrover"),
            at_least=min(FIRST_TOUCH, statistics.median(machine)),
        ),
        gain("added time, datastates / async", spread, value=added, at_most=ADDED),
    ]  # fmt: skip


def _stalls(taken: dict[str, list[presets.Sample]], above: str, below: str) -> list[float]:
    return [a.stall_s / b.stall_s for a, b in zip(taken[above], taken[below], strict=True)]


def pipeline(
    job: Job, folder: Path, args: argparse.Namespace, settings: dict[str, Any]
) -> list[Row]:
    """Stages at once against one after another, save and load."""
    rows = []
    for name, compare, target in (
        ("save", stages.compare_save, SAVE),
        ("load", stages.compare_load, LOAD),
    ):
        found = compare(job, folder, args.rounds)
        settings[f"{name}_store_bytes_per_s"] = round(found.store_bytes_per_s)
        label = f"pipelined {name}"
        store = (
            f"on a store of {found.store_bytes_per_s / 1e6:.0f} MB/s: a pwrite or preadv of the "
            "real disk lasts at least bytes / rate, and the next one waits for it"
        )
        rows += [
            row(label, "serial", [one.total_s * 1e3 for one in found.serial], "ms"),
            row(label, "in the store", [one.store_s * 1e3 for one in found.serial], "ms"),
            row(label, "pipelined", [s * 1e3 for s in found.pipelined_s], "ms"),
            gain(label, [one.bound for one in found.serial], figure="bound", at_least=BOUND),
            gain(label, found.shares, figure="of the bound", at_least=BOUND_SHARE),
            gain(label, found.gains, at_least=target, note=store),
        ]
    return rows


def storage(
    job: Job, folder: Path, args: argparse.Namespace, settings: dict[str, Any]
) -> list[Row]:
    """Several direct writers against one through the page cache."""
    nbytes = max(settings["state_bytes"], args.write_mib * 2**20)
    taken = writers.measure(nbytes, folder, args.rounds)
    ratios = [a / b for a, b in zip(taken["sync"], taken["fastpersist"], strict=True)]
    rows = [
        row(f"write as {name}", "until durable", [s * 1e3 for s in samples], "ms")
        for name, samples in taken.items()
    ]
    return [*rows, gain("write, sync / fastpersist", ratios, at_least=1.0)]


def flight(job: Job, folder: Path, args: argparse.Namespace, settings: dict[str, Any]) -> list[Row]:
    """Durable checkpoints in the same time, one or several in flight."""
    every, saves = 2, 16
    settings["in_flight"] = {"every": every, "due_per_window": saves}
    rows = []
    for per_file, limit in ((True, "each file"), (False, "all files")):
        found = in_flight.measure(
            job, folder, every=every, saves=saves, rounds=max(2, args.rounds // 2),
            per_file=per_file,
        )  # fmt: skip
        pairs = zip(found[in_flight.SEVERAL], found[in_flight.ONE], strict=True)
        rows += [
            _durable(f"{name}, store limits {limit}", counts) for name, counts in found.items()
        ]
        rows.append(
            gain(
                f"durable saves, pccheck / checkfreq, store limits {limit}",
                [several / max(1, one) for several, one in pairs],
                at_least=IN_FLIGHT if per_file else None,
            )
        )
    return rows


def _durable(contestant: str, counts: list[int]) -> Row:
    return replace(row(contestant, "durable", [float(count) for count in counts], ""), unit="saves")


PARTS: dict[str, Callable[[Job, Path, argparse.Namespace, dict[str, Any]], list[Row]]] = {
    "training": training,
    "pipeline": pipeline,
    "storage": storage,
    "flight": flight,
}


if __name__ == "__main__":
    main()
