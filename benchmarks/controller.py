"""`make bench-controller`: what the online controller costs a training step.

A session trains with a checkpoint every few steps and re-tuning on.  Two figures, per step: what
the training thread spends telling the controller, and the CPU time of the thread that thinks, which
shares the interpreter with the training.  CPU time, so that a loaded machine changes little.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import parse, publish, row
from benchmarks.job import Job

EVERY = 4
"""Steps between checkpoints: far more often than in practice, so that there is much to tell."""
AT_MOST_US = 100.0


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=100)
    args = parse(parser, rounds=1, iterations=8)
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="bench-controller-", dir=os.getcwd()))
    try:
        told_us, thought_us, step_ms = measure(args.rounds, args.iterations, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish(
        "controller",
        [
            row("autockpt", "training thread, per step", told_us, "us", at_most=AT_MOST_US),
            row("autockpt", "thinking thread, per step", thought_us, "us", at_most=AT_MOST_US),
            row("autockpt", "step", step_ms, "ms"),
        ],
        settings={"rounds": args.rounds, "iterations": args.iterations, "every": EVERY},
        smoke=args.smoke,
    )


def measure(
    rounds: int, iterations: int, folder: Path
) -> tuple[list[float], list[float], list[float]]:
    """(us told, us thought, ms of wall time) per step of each round."""
    import autockpt
    from autockpt.session import Session
    from autockpt.values.goal import Goal, Pins

    os.environ["AUTOCKPT_NO_PROFILE"] = "1"
    job = Job("1m", 32)
    job.iterate()
    pins = Pins(memory_interval_steps=EVERY, disk_interval_steps=EVERY, retune=True)
    session = autockpt.attach(
        model=job.model, optimizer=job.optimizer, run_dir=str(folder / "run"), goal=Goal(pins=pins)
    )
    assert isinstance(session, Session)
    mind = session._plans.tuner
    assert mind is not None
    assert mind._thread.ident is not None
    told = Stopwatch(mind.observe)
    session._rank.telemetry.listener = told
    clock = time.pthread_getcpuclockid(mind._thread.ident)
    figures: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(rounds):
        began, told.spent_s, thinking_s = time.perf_counter(), 0.0, time.clock_gettime(clock)
        for _ in range(iterations):
            job.iterate()
            session.step()
        figures[0].append(told.spent_s / iterations * 1e6)
        figures[1].append((time.clock_gettime(clock) - thinking_s) / iterations * 1e6)
        figures[2].append((time.perf_counter() - began) / iterations * 1e3)
    session.close(final_checkpoint=False)
    return figures


class Stopwatch:
    """A function with the CPU time that its callers spend in it."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.spent_s = 0.0

    def __call__(self, *arguments: Any) -> None:
        """Calls it."""
        began = time.thread_time()
        self._function(*arguments)
        self.spent_s += time.thread_time() - began


if __name__ == "__main__":
    main()
