"""`make bench-reshard`: what it costs to plan, divide and put together a checkpoint of many ranks.

Part "load": real processes, 2 and 4 gloo ranks on one machine, one state under DDP: our load, each
chunk read once for all, against one rank that reads and broadcasts, against torch DCP, against a
plain direct read of the same unique bytes divided over the ranks (alone, with the copy that every
rank must have of them, and with their digests too), and against our own load under another mesh
(fully_shard, which also loads what it saved itself).  Page
cache dropped before each, ways in turn, ratios within a round.  Free memory is the replica's own
before the clock starts, as in `benchmarks.restore`, which says why.

Part "scale": the planner's real code on what the ranks of a job of 405 billion parameters hold,
from 8 to 16,384 ranks (`synthetic`).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, parse, publish, row
from benchmarks.reshard_scale import SCALES, SMOKE_SCALES
from benchmarks.reshard_scale import measure as measure_scale

ROOT = Path(__file__).parent.parent
NAMES = {
    "read": "plain O_DIRECT read of the unique bytes",
    "fill": "plain read, and each rank fills its memory",
    "digest": "plain read, digest and fill",
    "ours": "autockpt, DDP",
    "reshard": "autockpt, DDP to fully_shard",
    "own": "autockpt, fully_shard to its own mesh",
    "apart": "autockpt, every rank by itself",
    "broadcast": "rank 0 loads and broadcasts",
    "dcp": "torch DCP",
}
NOTES = {
    "rank 0 loads and broadcasts": "torch.load of one file, gloo broadcast of every tensor, "
    "load_state_dict; it checks no digest",
    "torch DCP": "get_state_dict, load, set_state_dict; it checks no digest",
    "plain O_DIRECT read of the unique bytes": "each rank its part, into memory that is there",
    "plain read, and each rank fills its memory": "the floor without digests: beside the read "
    "every rank copies as many bytes as it holds, parameters to memory that is there, the rest to "
    "new memory",
    "plain read, digest and fill": "the floor of a load that checks: the same, and each rank "
    "digests every chunk that it read, in the threads that read",
    "autockpt, fully_shard to its own mesh": "a checkpoint of fully_shard: each rank reads its own "
    "shard, nothing is shared",
}
BROADCAST_TARGET, COLD_TARGET, RESHARD_TARGET = 0.75, 1.3, 1.25
DCP_TARGET, READ_TARGET, BALANCE_TARGET = 2.0, 1.05, 1.05
WITHIN_S = 1200


def run_ranks(ranks: int, size: str, tokens: int, rounds: int) -> dict[str, Any]:
    """The figures of one job of so many ranks.  Raises RuntimeError with the log of a failure."""
    folder = tempfile.mkdtemp(prefix="bench-reshard-", dir=os.getcwd())
    try:
        logs = [Path(folder, f"rank-{rank}.log") for rank in range(ranks)]
        command = [sys.executable, "-m", "benchmarks.reshard_ranks", folder, size, str(tokens)]
        processes = []
        for rank, log in enumerate(logs):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "AUTOCKPT_LAUNCH_ID": f"bench-{folder}", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            with log.open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [*command, str(rounds)], cwd=ROOT, env=environment, stdout=output,
                        stderr=output,
                    )
                )  # fmt: skip
        try:
            failed = [p.wait(timeout=WITHIN_S) for p in processes]
        finally:
            for process in processes:
                process.kill()
        if any(failed):
            raise RuntimeError("".join(log.read_text()[-2000:] for log in logs))
        found: dict[str, Any] = json.loads(Path(folder, "figures.json").read_text())
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_rows(ranks: int, found: dict[str, Any]) -> list[Row]:
    """Times and rates of all, and the ratios that have targets."""
    unique = sum(found["sizes"])
    rows = []
    for key, taken in found["seconds"].items():
        name = f"{NAMES[key]}, {ranks} ranks"
        rows.append(row(name, "time", [s * 1e3 for s in taken], "ms"))
        rows.append(row(name, "rate", [unique / s / 1e9 for s in taken], "GB/s"))
        read = found["read"].get(key)
        if read is not None:
            limit = READ_TARGET if key == "ours" else None
            rows.append(
                row(name, "read over unique", [r / unique for r in read], "x", at_most=limit)
            )

    def ratio(over: str, ours: str, other: str, **target: float) -> None:
        pairs = zip(found["seconds"][ours], found["seconds"][other], strict=True)
        name = f"{NAMES[ours]}, {ranks} ranks"
        rows.append(row(name, over, [a / b for a, b in pairs], "x", **target))

    ratio("over the plain read", "ours", "read", at_most=COLD_TARGET)
    ratio("over the plain read", "own", "read")
    ratio("over the plain read", "fill", "read")
    ratio("over the plain read", "digest", "read")
    ratio("over the read and fill", "ours", "fill")
    ratio("over the read, digest and fill", "ours", "digest")
    ratio("over the broadcast", "ours", "broadcast", at_most=BROADCAST_TARGET)
    ratio("over the same mesh", "reshard", "ours", at_most=RESHARD_TARGET)
    ratio("over autockpt", "dcp", "ours", at_least=DCP_TARGET)
    mean = unique / len(found["sizes"])
    balance = [max(found["sizes"]) / mean]
    name = f"{NAMES['ours']}, {ranks} ranks"
    rows.append(row(name, "largest writer over mean", balance, "x", at_most=BALANCE_TARGET))
    return rows


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--part", choices=("load", "scale", "both"), default="both")
    parser.add_argument("--size", default="60m")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    args = parse(parser, size="1m", tokens=16, rounds=1)
    rows: list[Row] = []
    if args.part != "scale":
        for ranks in (2,) if args.smoke else (2, 4):
            rows += load_rows(ranks, run_ranks(ranks, args.size, args.tokens, args.rounds))
    if args.part != "load":
        rows += measure_scale(SMOKE_SCALES if args.smoke else SCALES)
    settings = {"size": args.size, "tokens": args.tokens, "rounds": args.rounds, "part": args.part}
    publish("reshard", rows, settings=settings, notes=NOTES, smoke=args.smoke)


if __name__ == "__main__":
    main()
