"""`make bench-idle`: what an attached session costs an iteration in which nothing is due.

Two figures: microseconds of an iteration boundary by itself, and the ratio of a training loop with
a session to the same loop without one, in alternating segments of one process.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import publish, row
from benchmarks.job import Job


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--segments", type=int, default=40)
    parser.add_argument("--iterations", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="bench-idle-", dir=os.getcwd()))
    try:
        boundary_us, ratios = measure(args.segments, args.iterations, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish(
        "idle",
        [
            row("autockpt", "boundary", boundary_us, "us", at_most=50.0),
            row("autockpt", "iteration with/without", ratios, "x", at_most=1.01),
        ],
        settings={"segments": args.segments, "iterations": args.iterations},
    )


def measure(segments: int, iterations: int, folder: Path) -> tuple[list[float], list[float]]:
    """(microseconds per boundary, with/without ratios per pair of segments)."""
    import autockpt
    from autockpt.values.goal import Goal, Pins

    never = 10**9
    os.environ["AUTOCKPT_NO_PROFILE"] = "1"
    job = Job("1m", 32)
    job.iterate()
    session = autockpt.attach(
        model=job.model,
        optimizer=job.optimizer,
        run_dir=str(folder / "run"),
        goal=Goal(pins=Pins(memory_interval_steps=never, disk_interval_steps=never, retune=False)),
    )
    for _ in range(10):
        job.iterate()
        session.step()
    ratios = []
    for _ in range(segments):
        began = time.perf_counter()
        for _ in range(iterations):
            job.iterate()
            session.step()
        middle = time.perf_counter()
        for _ in range(iterations):
            job.iterate()
        ratios.append((middle - began) / (time.perf_counter() - middle))
    boundaries = []
    for _ in range(200):
        began = time.perf_counter()
        for _ in range(10):
            session.step()
        boundaries.append((time.perf_counter() - began) / 10 * 1e6)
    session.close(final_checkpoint=False)
    return [statistics.median(boundaries)], ratios


if __name__ == "__main__":
    main()
