"""`make bench-bubbles`: checkpoints in the idle windows of pipelines, beside other ways.

Real pipeline training on gloo ranks of this machine.  Each rank is bound to a core with all of
its threads, as `numactl` binds them (`--unbound`: not).  With 2 stages the compute is real.  With 4
and 8 stages the **accelerator is emulated**: a chunk is a small real kernel and a timed wait, as a
host sees a GPU, so those figures hold for the host's side of a checkpoint (memory, cores, the
interpreter's lock) and say nothing of a device's copy engine or bus.

**Gaps**: of iterations without a checkpoint, measured by the bubble probe against the list
scheduler's, which is given what each chunk, each optimizer's step and each host between two chunks
took in these iterations, and the latency of a message. A gap is what the host does in it and what
the rank then waits for others; **waits** are the second part alone, which only the scheduler knows.
**Cost**: a whole checkpoint of every rank into host memory at every iteration, copied and proven;
blocks of iterations with it against the blocks without before and after it, in an order drawn anew
each round; medians of iterations, the mean over ranks, and over rounds the median of the means of
all pairs of them (Hodges and Lehmann), with its 95 % interval. `blocking` copies at the boundary,
`async` in a plain thread with torch's own copies, `lazy` under forward and backward, `windows` in
the gaps, four times a round; `control` takes none, and says how far equal blocks are apart; `bare`
is no checkpoint, only its bytes, copied by a thread that does nothing else, all at once in the
longest gap of its rank: the least that windows can cost here, where ranks share cores and memory.
What follows a copy (digest, disk) belongs to the keeper and is in none of them. All blocks run with
the bound for glibc's copies that `autockpt run` would set here (`make bench-copies`), and ranks
keep the memory that they free, as the allocator of a device does: new pages for the gradients of
each iteration were half of the scatter where compute is real. **Optimizer longer**: the part of the
cost of windows which is the optimizer's step of one rank, the rank where it is longest; it moves
memory like a copy, and another rank's copy is beside it. **Inside windows**: bytes whose copy
overlapped no compute of their rank, by the clock.

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
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from autockpt.executors.linux.memcpy_threshold import PIECE_BYTES, chosen
from autockpt.profiles import windows
from autockpt.profiles.pipeline import STEADY_AFTER, RankWork, replayed
from autockpt.profiles.probes.copies import copy_gain
from autockpt.profiles.samples import TraceSample
from autockpt.values.pipeline import parse_order
from benchmarks.bubbles_rank import WAYS
from benchmarks.harness import Row, bootstrap_interval, parse, pseudomedian, publish, row
from benchmarks.pipeline_job import Shape

EMULATED = {"forward_s": 0.008, "width": 0, "layers": 0, "state_bytes": 64 * 2**20, "rows": 4}
REAL = {"forward_s": 0.0, "width": 1024, "layers": 8, "state_bytes": 0, "rows": 64}
LARGE = {**REAL, "rows": 256}
"""More compute for each byte of the state, as training has it that fills its device."""
SHAPES = {
    "2 stages 1F1B, real": Shape(schedule="1F1B", ranks=2, microbatches=4, **REAL),  # type: ignore[arg-type]
    "2 x 2 interleaved, real": Shape(schedule="Interleaved1F1B", ranks=2, microbatches=4, **REAL),  # type: ignore[arg-type]
    "2 stages 1F1B, real, 256 rows": Shape(
        schedule="1F1B", ranks=2, microbatches=4, **LARGE),  # type: ignore[arg-type]
    "2 x 2 interleaved, real, 256 rows": Shape(
        schedule="Interleaved1F1B", ranks=2, microbatches=4, **LARGE),  # type: ignore[arg-type]
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
NO_GAPS = 0.02
"""Ranks whose gaps are less than this fraction of an iteration have none: it would be noise."""
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**32)}
"""For glibc: what a rank frees stays its own."""
REAL_ROUNDS = 2
"""Times as many where compute is real and short: equal blocks are further apart."""


def main() -> None:
    """Measures and publishes."""
    args = arguments(sys.argv[1:])
    rows: list[Row] = []
    added = {**KEPT, **chosen(os.environ, partial(copy_gain, piece_bytes=PIECE_BYTES))}
    for name, shape in SHAPES.items():
        if args.only in name:
            rounds = args.rounds * (REAL_ROUNDS if shape.rows == REAL["rows"] else 1)
            print(f"{name}: {shape.ranks} ranks, {rounds} rounds", flush=True)
            rows += shape_rows(name, run(shape, rounds, args, added))
    notes = {
        name: "chunks are a small real kernel and a timed wait: no device, no bus"
        for name in SHAPES
        if args.only in name and "emulated" in name
    }
    settings = {
        **vars(args),
        "environment": added,
        "shapes": {n: asdict(s) for n, s in SHAPES.items()},
    }
    publish(
        "bubbles", rows, settings=settings, notes=notes, variant=variant(args), smoke=args.smoke
    )


def arguments(given: list[str]) -> argparse.Namespace:
    """What may be asked for."""
    parser = argparse.ArgumentParser(prog="bench-bubbles")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=4, help="of a block")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="to checkpoint")
    parser.add_argument("--unbound", action="store_true", help="no rank has a core of its own")
    return parse(parser, given, rounds=1, iterations=3, only="4 stages")


def variant(args: argparse.Namespace) -> str:
    """Of the results' name: a part of the table does not take the place of the whole."""
    words: list[str] = args.only.replace(",", " ").split()
    words += [] if args.ways == [*WAYS] else args.ways
    words += ["unbound"] * args.unbound
    return "".join(f"-{word}" for word in words)


def run(
    shape: Shape, rounds: int, args: argparse.Namespace, added: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What each rank of one job saw, with `added` in its environment."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="bench-bubbles-") as folder:
        given = Path(folder, "given.json")
        given.write_text(json.dumps({
            "shape": asdict(shape), "rounds": rounds,
            "ways": args.ways, "iterations": args.iterations,
        }))  # fmt: skip
        outs = [Path(folder, f"{rank}.json") for rank in range(shape.ranks)]
        environment = {
            **os.environ,
            **added,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bubbles_rank"]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for number, out in enumerate(outs):
                # All of its threads have the affinity of who began it.
                os.sched_setaffinity(0, cores if args.unbound else {cores[number % len(cores)]})
                job = [*command, str(number), str(out), str(given)]
                ranks.append(subprocess.Popen(job, env=environment))
            os.sched_setaffinity(0, cores)
            for rank in ranks:
                if rank.wait(timeout=1200):
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
    if any(block[0] == "windows" for block in ranks[0]["blocks"]):
        rows.append(
            row(name, "inside windows", shares, "fraction", at_least=0.9,
                statistic=statistics.fmean,
                note="" if len(used) == len(ranks) else f"{len(ranks) - len(used)} of {len(ranks)} "
                f"ranks copied beside the compute; {_reason(ranks)}")
        )  # fmt: skip
    overhead = [rank["probe_overhead"] for rank in ranks]
    rows.append(row(name, "probe overhead", overhead, "fraction", at_most=0.01, statistic=max))
    marks = [rank["mark_us_p50"] for rank in ranks]
    rows.append(row(name, "mark of the gate", marks, "us", at_most=20, statistic=max))
    rows.append(row(name, "iteration", [rank["iteration_s"] * 1e3 for rank in ranks], "ms"))
    return rows


def _reason(ranks: list[dict[str, Any]]) -> str:
    return next(rank["reason"] for rank in ranks if rank["reason"])


def _gap_rows(name: str, ranks: list[dict[str, Any]]) -> list[Row]:
    """How far the measured gaps are from the scheduler's: together, and the long ones each."""
    totals, longs, waits = [], [], []
    for rank, (measured, planned) in zip(ranks, traces_of(ranks), strict=True):
        real, plan = gaps_s(measured), gaps_s(planned)
        if sum(plan.values()) < NO_GAPS * rank["iteration_s"]:
            continue
        totals.append(_off(sum(real.values()), sum(plan.values())))
        longs += [
            _off(real.get(after, 0.0), length_s)
            for after, length_s in plan.items()
            if length_s >= LONG * max(plan.values())
        ]
        pauses_s = [sum(trace) for block in rank["pauses_s"] for trace in block[STEADY_AFTER:]]
        if _wait_s(planned, pauses_s) >= NO_GAPS * rank["iteration_s"]:
            waits.append(_off(_wait_s(measured, pauses_s), _wait_s(planned, pauses_s)))
    if not totals:
        return []
    note = "" if waits else "nobody waits"
    return [
        row(name, "gaps of a rank off by", totals, "fraction", at_most=0.15),
        row(name, "long gaps off by", longs, "fraction", at_most=0.15),
        row(name, "waits of a rank off by", waits, "fraction", note=note),
    ]


def _off(real_s: float, planned_s: float) -> float:
    return abs(real_s / planned_s - 1)


def _wait_s(traces: list[TraceSample], pauses_s: list[float]) -> float:
    """Median over iterations of what a rank waited: its gaps without what its host did in them."""
    idle_s = [trace.step_s - sum(end - begin for begin, end in trace.spans) for trace in traces]
    return statistics.median(idle - own for idle, own in zip(idle_s, pauses_s, strict=True))


def traces_of(ranks: list[dict[str, Any]]) -> list[tuple[list[TraceSample], list[TraceSample]]]:
    """Of each rank the iterations without a checkpoint, as recorded and as the scheduler has them.

    The scheduler is given what in these iterations each chunk, each optimizer's step and each host
    between two chunks took, and the latency of a message.  All ranks begin a block together, and
    its first iterations fill the pipeline.
    """
    orders = [parse_order(rank["order"]) for rank in ranks]
    latency_s = message_s(ranks)
    found: list[tuple[list[TraceSample], list[TraceSample]]] = [([], []) for _ in ranks]
    for number in range(len(ranks[0]["quiet"])):
        recorded = [[_trace(saved) for saved in rank["quiet"][number]] for rank in ranks]
        pauses = [rank["pauses_s"][number] for rank in ranks]
        work = [
            [_work(*each) for each in zip(traces, pauses_s, strict=True)]
            for traces, pauses_s in zip(recorded, pauses, strict=True)
        ]
        planned = replayed(orders, list(zip(*work, strict=True)), transfer_s=latency_s)
        for (real, plan), ran, laid_out in zip(found, recorded, planned, strict=True):
            real += ran[STEADY_AFTER:]
            plan += laid_out[STEADY_AFTER:]
    return found


def message_s(ranks: list[dict[str, Any]]) -> float:
    """From the end of a chunk to the begin of one that waits for it: handing over, and the link.

    Means, because the messages of a chain add up.
    """
    hand_over_s = statistics.fmean(s for rank in ranks for s in rank["hand_overs_s"])
    return hand_over_s + float(ranks[0]["transfer_s"])


def _trace(saved: dict[str, Any]) -> TraceSample:
    spans = tuple((begin, end) for begin, end in saved["spans"])
    return TraceSample(**{**saved, "marks": tuple(saved["marks"]), "spans": spans})


def _work(trace: TraceSample, pauses_s: list[float]) -> RankWork:
    return RankWork(
        chunks_s=tuple(end - begin for begin, end in trace.spans),
        between_s=tuple(pauses_s),
        step_s=trace.iteration_s - trace.step_s,
    )


def gaps_s(traces: list[TraceSample]) -> dict[int, float]:
    """Median seconds of each gap that counts as one, by the chunks that ended before it."""
    return {gap.after: gap.length_s.p50 for gap in windows.device_bubbles(traces, rank=0)}


def _cost_rows(name: str, ranks: list[dict[str, Any]]) -> list[Row]:
    """What a checkpoint of every iteration costs, by way."""
    rows = []
    for way in WAYS:
        pairs = [[b[1:] for b in rank["blocks"] if b[0] == way] for rank in ranks]
        if not pairs[0]:
            continue  # not asked for
        costs = [2 * sum(took[0] for took, _, _ in at) / sum(b[0] + a[0] for _, b, a in at) - 1
                 for at in zip(*pairs, strict=True)]  # fmt: skip
        low, high = bootstrap_interval(costs, pseudomedian)
        rows.append(
            row(name, f"cost, {way}", costs, "fraction", statistic=pseudomedian,
                at_most=0.01 if way == "windows" else None,
                note=f"95 % interval {100 * low:.1f} to {100 * high:.1f} %")
        )  # fmt: skip
        if way == "windows":
            longer = [pseudomedian([_longer(*pair) for pair in of_rank]) for of_rank in pairs]
            rows.append(row(name, "optimizer longer", longer, "fraction", statistic=max))
    return rows


def _longer(took: list[float], before: list[float], after: list[float]) -> float:
    """How much longer the optimizer took than in the blocks around, in iterations."""
    return (2 * took[1] - before[1] - after[1]) / (before[0] + after[0])


if __name__ == "__main__":
    main()
