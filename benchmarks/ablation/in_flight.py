"""One checkpoint on its way to storage, or several, where storage is slower than the interval.

Each preset trains windows in turn, every few iterations a save is due, and one save takes 2.5 times
as long as the interval because its keeper writes to a slow store.  What counts is how many are
durable within the window.  The store is limited either per file, as a network store whose streams
are limited, or as a whole, as a disk: then several only share it.
"""

import os
import shutil
import time
from pathlib import Path

from autockpt.run_directory import RunDirectory
from autockpt.session import Session
from autockpt.values.telemetry import CheckpointDurable
from benchmarks.ablation.presets import attach, goal_of, iterate
from benchmarks.ablation.store import keepers_on_a_slow_store
from benchmarks.job import Job

ONE, SEVERAL = "checkfreq", "pccheck"
INTERVALS = 2.5
"""How many intervals one save takes on the slow store."""


def measure(
    job: Job, folder: Path, *, every: int, saves: int, rounds: int, per_file: bool
) -> dict[str, list[int]]:
    """Durable checkpoints of each window by preset; `saves` were due in each."""
    state_bytes = sum(tensor.nbytes for tensor in job.tensors())
    interval_s = iterate(job, None, 2 * every) / 2
    sessions: dict[str, Session] = {}
    durable: dict[str, list[int]] = {ONE: [], SEVERAL: []}
    os.environ["AUTOCKPT_NO_PROFILE"] = "1"
    try:
        rate = state_bytes / (INTERVALS * interval_s)
        with keepers_on_a_slow_store(rate, per_file=per_file):
            for name in durable:
                sessions[name] = attach(job, folder / name, goal_of(name, every=every))
        for _ in range(rounds):
            for name, session in sessions.items():
                durable[name].append(_window(job, session, folder / name, every * saves))
    finally:
        for name, session in sessions.items():
            session.close(final_checkpoint=False)
            shutil.rmtree(folder / name, ignore_errors=True)
    return durable


def _window(job: Job, session: Session, run_directory: Path, iterations: int) -> int:
    """Checkpoints that became durable while `iterations` were trained; drained before and after."""
    session.wait_durable(120.0)
    began_s = time.monotonic()
    iterate(job, session, iterations)
    ended_s = time.monotonic()
    session.wait_durable(120.0)
    return sum(
        began_s <= event.at_s <= ended_s
        for event in RunDirectory.open(str(run_directory)).events()
        if isinstance(event, CheckpointDurable)
    )
