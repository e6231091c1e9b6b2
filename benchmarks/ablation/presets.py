"""Presets in turn on one training: what a checkpoint of each costs.

A round of a preset is a segment of k iterations that begins with a checkpoint, a wait until that is
durable (outside the figures), and a segment of k iterations without one, paired within seconds so
that the machine's drift cancels.  All presets attach to the same model with slots of their own.
"""

import gc
import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import autockpt
from autockpt.policies.policy_file import load_policy
from autockpt.policies.staging.slots import slots_for
from autockpt.session import Session
from autockpt.session.attaches import of_this_process
from autockpt.values.goal import Goal, Retention
from benchmarks.harness import Row, row
from benchmarks.job import Job

NEVER = 10**9
PATIENCE_S = 60.0
"""A save is asked for until one begins: a slot may be on its way to the disk."""
NOTHING = "no checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One checkpoint of one preset, seconds."""

    stall_s: float
    """Training blocked, at the boundary and at the fence."""
    added_s: float
    """Segment with the checkpoint beyond the one without."""
    durable_s: float
    iteration_s: float


def goal_of(preset: str, *, every: int = NEVER, slots: int | None = None) -> Goal:
    """The preset with intervals of our own and nothing re-tuned."""
    goal = load_policy(f"builtin:{preset}").goal
    off = goal.pins.memory_enabled is False
    pins = replace(
        goal.pins,
        disk_interval_steps=every,
        memory_interval_steps=None if off else every,
        slots=slots or goal.pins.slots or slots_for(goal.pins),
        retune=False,
    )
    return replace(goal, pins=pins, retention=Retention(keep_last=1))


def attach(job: Job, folder: Path, goal: Goal) -> Session:
    """A session on the job, with its slots there."""
    os.environ["AUTOCKPT_NO_PROFILE"] = "1"
    # Contestants share one training on purpose; a script's later attach ends the former run.
    with patch.object(type(of_this_process), "end_former"):
        session = autockpt.attach(
            model=job.model, optimizer=job.optimizer, data="script", run_dir=str(folder), goal=goal
        )
    assert isinstance(session, Session)  # and not one that lets a profiled job through
    deadline = time.monotonic() + 120
    while not session.ready:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{folder.name}: no slots within 120 s")
        job.iterate()
        session.step()
    return session


def iterate(job: Job, session: Session | None, count: int) -> float:
    """Seconds of `count` iterations."""
    began = time.perf_counter()
    for _ in range(count):
        job.iterate()
        if session is not None:
            session.step()
    return time.perf_counter() - began


def begin_save(job: Job, session: Session) -> float:
    """Trains to a boundary at which a durable checkpoint begins; `perf_counter` in front of it.

    A checkpoint waits for an optimizer's step, and for a free slot.  Raises RuntimeError when none
    began within `PATIENCE_S`.
    """
    newest, deadline_s = session._client.saves.newest_on_disk, time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        job.iterate()
        began = time.perf_counter()
        session.save()
        session.step()
        if session._client.saves.newest_on_disk != newest:
            return began
    raise RuntimeError(f"no checkpoint began within {PATIENCE_S:g} s: is no slot free?")


def one_round(job: Job, session: Session | None, every: int) -> Sample:
    """A segment with a checkpoint and one without."""
    gc.collect()
    iterate(job, session, 1)
    began, fenced_s, durable_s = time.perf_counter(), 0.0, 0.0
    if session is not None:
        began = begin_save(job, session)
        fenced_s = session.fence_stall_s  # so far: a blocking copy is fenced inside the boundary
    began_monotonic = time.monotonic() - (time.perf_counter() - began)
    stall_s = time.perf_counter() - began
    iterate(job, session, every)
    with_s = time.perf_counter() - began
    if session is not None:
        stall_s += session.fence_stall_s - fenced_s
        durable_s = session.wait_durable(120.0) - began_monotonic
    iterate(job, session, 1)
    without_s = iterate(job, session, every)
    return Sample(
        stall_s=stall_s, added_s=with_s - without_s, durable_s=durable_s,
        iteration_s=without_s / every,
    )  # fmt: skip


def measure(
    job: Job, folder: Path, presets: tuple[str, ...], *, rounds: int, every: int
) -> dict[str, list[Sample]]:
    """All rounds; the first, which allocates what is allocated once, is dropped."""
    sessions: dict[str, Session | None] = {NOTHING: None}
    samples: dict[str, list[Sample]] = {name: [] for name in (NOTHING, *presets)}
    try:
        for name in presets:
            sessions[name] = attach(job, folder / name, goal_of(name, slots=2))
        for turn in range(rounds + 1):
            for name, session in sessions.items():
                sample = one_round(job, session, every)
                if turn:
                    samples[name].append(sample)
                print(f"round {turn} {name:<24} {_said(sample)}", file=sys.stderr, flush=True)
    finally:
        for session in sessions.values():
            if session is not None:
                session.close(final_checkpoint=False)
        for name in presets:
            shutil.rmtree(folder / name, ignore_errors=True)
    return samples


def rows_of(samples: dict[str, list[Sample]]) -> list[Row]:
    """What each preset costs, without any target."""
    rows = []
    for name, taken in samples.items():
        rows.append(row(name, "added time", [s.added_s * 1e3 for s in taken], "ms"))
        if name != NOTHING:
            rows.append(row(name, "stall", [s.stall_s * 1e3 for s in taken], "ms"))
            rows.append(row(name, "until durable", [s.durable_s * 1e3 for s in taken], "ms"))
    return rows


def iteration_s(samples: dict[str, list[Sample]]) -> float:
    """Median of an iteration without a checkpoint."""
    return statistics.median(s.iteration_s for taken in samples.values() for s in taken)


def _said(sample: Sample) -> str:
    return (
        f"stall={sample.stall_s:.4f} added={sample.added_s:.4f} durable={sample.durable_s:.4f} "
        f"iteration={sample.iteration_s:.4f}"
    )
