"""`make bench-bubbles`: checkpoints in the idle windows of pipelines, beside other ways.

Real pipeline training on gloo ranks of this machine.  With 2 stages the compute is real, one core
each; with 4 and 8 stages the **accelerator is emulated**: a chunk is a small real kernel and a
timed wait, as a host sees a GPU, so those figures hold for the host's side of a checkpoint (memory,
cores, the interpreter's lock) and say nothing of a device's copy engine or bus.

**Gaps**: of iterations without a checkpoint, measured by the bubble probe against the list
scheduler's from the same iterations' chunk times, the latency of a message and what a host needs
between two chunks. **Cost**: a whole checkpoint of every rank into host memory at every
iteration, copied and proven; blocks of iterations with it against blocks without, right before,
in an order drawn anew each round; medians of iterations, the mean over ranks, the median over
rounds. `blocking` copies at the boundary, `async` in a plain thread with torch's own copies,
`lazy` under forward and backward, `windows` in the gaps. What follows a copy (digest, disk)
belongs to the keeper and is in none of them. **Inside windows**: bytes whose copy overlapped no
compute of their rank, by the clock.

Replication over a shaped link: `benchmarks.bubbles_network`.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, publish, row
from benchmarks.pipeline_job import Shape

EMULATED = {"forward_s": 0.008, "width": 0, "layers": 0, "state_bytes": 64 * 2**20}
REAL = {"forward_s": 0.0, "width": 1024, "layers": 8, "state_bytes": 0}
SHAPES = {
    "2 stages 1F1B, real": Shape(schedule="1F1B", ranks=2, microbatches=4, **REAL),  # type: ignore[arg-type]
    "2 x 2 interleaved, real": Shape(schedule="Interleaved1F1B", ranks=2, microbatches=4, **REAL),  # type: ignore[arg-type]
    "4 stages 1F1B, emulated": Shape(schedule="1F1B", ranks=4, microbatches=8, **EMULATED),  # type: ignore[arg-type]
    "4 x 2 interleaved, emulated": Shape(
        schedule="Interleaved1F1B", ranks=4, microbatches=8, **EMULATED),  # type: ignore[arg-type]
    "8 stages 1F1B, emulated": Shape(schedule="1F1B", ranks=8, microbatches=16, **EMULATED),  # type: ignore[arg-type]
    "8 x 2 interleaved, emulated": Shape(
        schedule="Interleaved1F1B", ranks=8, microbatches=16, **EMULATED),  # type: ignore[arg-type]
    "4 x 2 zero bubble V, emulated": Shape(
        schedule="ZBVZeroBubble", ranks=4, microbatches=16, **EMULATED),  # type: ignore[arg-type]
}  # fmt: skip
LONG = 0.25
"""Gaps of at least this fraction of a rank's longest are compared one by one."""
WAYS = ("blocking", "async", "lazy", "windows")


def main() -> None:
    """Measures and publishes."""
    args = arguments(sys.argv[1:])
    rows: list[Row] = []
    for name, shape in SHAPES.items():
        if args.only in name:
            print(f"{name}: {shape.ranks} ranks, {args.rounds} rounds", flush=True)
            rows += shape_rows(name, run(shape, args))
    notes = {
        name: "chunks are a small real kernel and a timed wait: no device, no bus"
        for name in SHAPES
        if "emulated" in name
    }
    settings = {**vars(args), "shapes": {n: asdict(s) for n, s in SHAPES.items()}}
    publish("bubbles", rows, settings=settings, notes=notes, variant="-quick" if args.quick else "")


def arguments(given: list[str]) -> argparse.Namespace:
    """What may be asked for."""
    parser = argparse.ArgumentParser(prog="bench-bubbles")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=8, help="of a block")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    args = parser.parse_args(given)
    if args.quick:
        args.rounds, args.iterations, args.only = 1, 3, args.only or "4 stages"
    return args


def run(shape: Shape, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank of one job saw."""
    with tempfile.TemporaryDirectory(prefix="bench-bubbles-") as folder:
        given = Path(folder, "given.json")
        given.write_text(json.dumps(
            {"shape": asdict(shape), "rounds": args.rounds, "iterations": args.iterations}
        ))  # fmt: skip
        outs = [Path(folder, f"{rank}.json") for rank in range(shape.ranks)]
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "benchmarks.bubbles_rank",
                 str(rank), str(out), str(given)],
                env=environment,
            )
            for rank, out in enumerate(outs)
        ]  # fmt: skip
        try:
            for rank in ranks:
                if rank.wait(timeout=600):
                    raise SystemExit(f"a rank of {shape} ended with {rank.returncode}")
        finally:
            for rank in ranks:
                rank.kill()
        return [json.loads(out.read_text()) for out in outs]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shape_rows(name: str, ranks: list[dict[str, Any]]) -> list[Row]:
    """The figures of one job."""
    if not all(rank["proven"] for rank in ranks):
        raise SystemExit(f"{name}: a checkpoint taken in windows is not equal to the state")
    rows = [*_gap_rows(name, ranks), *_cost_rows(name, ranks)]
    used = [rank for rank in ranks if not rank["reason"]]
    shares = [share for rank in used for share in rank["shares"]]
    rows.append(
        row(name, "inside windows", shares, "fraction", at_least=0.9, statistic=statistics.fmean,
            note="" if len(used) == len(ranks) else f"{len(ranks) - len(used)} of {len(ranks)} "
            f"ranks copied beside the compute; {_reason(ranks)}")
    )  # fmt: skip
    overhead = [rank["probe_overhead"] for rank in ranks]
    rows.append(row(name, "probe overhead", overhead, "fraction", at_most=0.01, statistic=max))
    marks = [rank["mark_us_p50"] for rank in ranks]
    rows.append(row(name, "mark of the gate", marks, "us", at_most=20, statistic=max))
    rows.append(row(name, "iteration", [rank["lap_s"] * 1e3 for rank in ranks], "ms"))
    return rows


def _reason(ranks: list[dict[str, Any]]) -> str:
    return next(rank["reason"] for rank in ranks if rank["reason"])


def _gap_rows(name: str, ranks: list[dict[str, Any]]) -> list[Row]:
    """How far the measured gaps are from the scheduler's: together, and the long ones each."""
    totals, longs = [], []
    for rank in ranks:
        gaps = list(rank["gaps"].values())
        planned = sum(plan for _, plan in gaps)
        if planned < 0.02 * rank["lap_s"]:
            continue  # a schedule without gaps: what is measured is noise
        totals.append(abs(sum(real for real, _ in gaps) / planned - 1))
        longest = max(plan for _, plan in gaps)
        longs += [abs(real / plan - 1) for real, plan in gaps if plan >= LONG * longest]
    if not totals:
        return []
    return [
        row(name, "gaps of a rank off by", totals, "fraction", at_most=0.15),
        row(name, "long gaps off by", longs, "fraction", at_most=0.15),
    ]


def _cost_rows(name: str, ranks: list[dict[str, Any]]) -> list[Row]:
    """What a checkpoint of every iteration costs, by way."""
    rows = []
    for way in WAYS:
        pairs = [[b[1:] for b in rank["blocks"] if b[0] == way] for rank in ranks]
        costs = [
            sum(p[0] for p in at) / sum(p[1] for p in at) - 1 for at in zip(*pairs, strict=True)
        ]
        at_most = 0.01 if way == "windows" else None
        rows.append(row(name, f"cost, {way}", costs, "fraction", at_most=at_most))
    return rows


if __name__ == "__main__":
    main()
