"""`make bench-codecs-training`: none and planes while a job trains, on stores of known speed.

What `auto` writes is what a user gets: `autockpt profile` measures the job on that store, and its
plan says which codec.  Then one training takes a checkpoint of each codec in turn (none, planes,
planes, none, ...), and goes on until it is durable, in a keeper that writes to the same store.
Time until durable, stall, and what the iterations take longer are those of whole trainings.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from autockpt.run_directory import RunDirectory
from autockpt.session import Session
from benchmarks.ablation.presets import Sample, attach, begin_save, goal_of, iterate
from benchmarks.ablation.store import keepers_on_a_slow_store
from benchmarks.compression.stores import RATES
from benchmarks.harness import Row, parse, publish, row
from benchmarks.job import Job

CODECS = ("none", "planes")
NOT_WORSE = 1.03
"""Of time until durable and of stall, over those of none."""
PATIENCE_S = 120.0
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--size", default="10m", help="of the example's model: 120 MB of state")
    parser.add_argument("--tokens", type=int, default=96, help="of a batch")
    parser.add_argument("--stores", nargs="+", choices=RATES, default=[*RATES])
    parser.add_argument("--rounds", type=int, default=12)
    args = parse(parser, size="1m", tokens=16, stores=["500 MB/s"], rounds=1)
    publish("codecs_training", measure(args), settings=vars(args), smoke=args.smoke)


def measure(args: argparse.Namespace) -> list[Row]:
    """Rows of every store."""
    rows: list[Row] = []
    job = Job(args.size, args.tokens)
    for store in args.stores:
        folder = Path(tempfile.mkdtemp(prefix="bench-codecs-", dir=Path.cwd()))
        try:
            with keepers_on_a_slow_store(RATES[store], per_file=False):
                chosen = planned(folder / "profile", args.size, args.tokens)
                samples = trained(job, folder, args.rounds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        rows += rows_of(store, samples, chosen)
    return rows


def planned(folder: Path, size: str, tokens: int) -> dict[str, str]:
    """Codecs by class in the plan that `autockpt profile` makes of this job on this store."""
    script = str(ROOT / "benchmarks" / "compression" / "trained.py")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    subprocess.run(
        [sys.executable, "-m", "autockpt", "profile", "--out", str(folder), script, size,
         str(tokens)],
        env=os.environ | {"PYTHONPATH": path}, check=True, stdout=sys.stderr,
    )  # fmt: skip
    decision = RunDirectory.open(folder).read_decision()
    if decision is None:
        raise RuntimeError(f"{folder}: autockpt profile wrote no plan")
    choice = decision.choice("codec")
    print("" if choice is None else choice.reason, file=sys.stderr, flush=True)
    return dict(decision.plan.tier("disk").codec)


def trained(job: Job, folder: Path, rounds: int) -> dict[str, list[Sample]]:
    """A checkpoint of each codec a round; the first, which allocates, is dropped."""
    sessions: dict[str, Session] = {}
    samples: dict[str, list[Sample]] = {name: [] for name in CODECS}
    auto = goal_of("auto")
    try:
        for name in CODECS:
            goal = replace(auto, pins=replace(auto.pins, codec=name))  # type: ignore[arg-type]
            sessions[name] = attach(job, folder / name, goal)
        for turn in range(rounds + 1):
            for name in CODECS if turn % 2 else reversed(CODECS):
                sample = one_save(job, sessions[name])
                if turn:
                    samples[name].append(sample)
                print(f"round {turn} {name}: {sample}", file=sys.stderr, flush=True)
    finally:
        for session in sessions.values():
            session.close(final_checkpoint=False)
    return samples


def one_save(job: Job, session: Session) -> Sample:
    """A checkpoint, iterations until it is durable, and as many without one."""
    iterate(job, session, 1)
    fenced_s = session.fence_stall_s
    began = begin_save(job, session)
    began_monotonic = time.monotonic() - (time.perf_counter() - began)
    stall_s, count, durable_at_s = time.perf_counter() - began, 0, 0.0
    while not durable_at_s:
        iterate(job, session, 1)
        count += 1
        durable_at_s = session.wait_durable(0.0)
        if time.perf_counter() - began > PATIENCE_S:
            raise RuntimeError(f"no checkpoint was durable within {PATIENCE_S:g} s")
    with_s = time.perf_counter() - began
    stall_s += session.fence_stall_s - fenced_s
    without_s = iterate(job, session, count)
    return Sample(
        stall_s=stall_s, added_s=with_s - without_s, durable_s=durable_at_s - began_monotonic,
        iteration_s=without_s / count,
    )  # fmt: skip


def rows_of(store: str, samples: dict[str, list[Sample]], chosen: dict[str, str]) -> list[Row]:
    """Figures of both codecs, and those of the one that the plan chose over those of none."""
    rows, said = [], ", ".join(f"{name}: {codec}" for name, codec in chosen.items())
    for name, taken in samples.items():
        rows.append(row(name, f"{store}: durable", [s.durable_s for s in taken], "s"))
        rows.append(row(name, f"{store}: stall", [s.stall_s * 1e3 for s in taken], "ms"))
        rows.append(row(name, f"{store}: lost", [s.added_s * 1e3 for s in taken], "ms"))
    own = samples["planes" if chosen else "none"]
    pairs = list(zip(own, samples["none"], strict=True))
    for figure, ratios in (
        ("durable", [a.durable_s / b.durable_s for a, b in pairs]),
        ("stall", [a.stall_s / b.stall_s for a, b in pairs]),
    ):
        rows.append(row("auto", f"{store}: {figure} / none", ratios, "x",
                        at_most=NOT_WORSE, note=f"the plan says {said or 'none'}"))  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
