"""`make bench-mind`: real jobs that are killed, and nothing was said of failures.

Each job is started by `autockpt run`, without a profile and without a failure rate.  Its trainer is
killed after stretches of training that a seed draws.  From the second failure on its goodput is
held against the best fixed interval in hindsight: the same lives and the same restarts, with the
costs that the run itself has observed, at the interval that would have kept most.  Each life has
a promise in force when it ends.  From the third failure on their mean, weighed by time, is held
against the loss that was observed, and that loss against the band of the last promise.

    make bench-mind               # 2 schedules of 5 kills, 2 sizes: at most 20 minutes
    make bench-mind BENCH_ARGS='--schedules 5 --kills 10 --stretch 10 60 --minutes 120'
    make bench-mind BENCH_ARGS=--smoke                     # a minute: does it work?

Jobs run one after the other.  None begins that would outlast `--minutes`, if it takes as long as
the longest before.
"""

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from autockpt.reports.analysis.promises import waste_band
from autockpt.run_directory import RunDirectory
from autockpt.values import telemetry as t
from autockpt.values.plan import Expected
from benchmarks.harness import Row, parse, publish, row

ROOT = Path(__file__).resolve().parents[1]
START_S = 240.0
"""A start that has not trained by then is given up."""
END_S = 120.0
POLL_S = 0.1
LATE_S = 5.0
"""A block of iterations may be reported so long after the end of its process."""
COUNTED_FROM = 2
"""Failures before goodput is counted: without any, nobody knows how often they come."""
PROMISED_FROM = 3
"""The same for promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process, from its first iteration to its end."""

    first_step: int
    """Iterations that it began with."""
    steps: int
    """That it trained."""
    began_s: float
    ended_s: float
    iteration_s: float
    """Mean iteration without background work: other jobs on the machine come and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of one life."""

    at_s: float
    """Monotonic."""
    expected: Expected | None
    """Promise in force; None: nothing was decided."""
    rate_shape: float = 1.0
    """Of the Gamma that the failure rate was taken to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one job showed, from the counted failure on."""

    goodput: float
    best_goodput: float
    best_interval_steps: int
    interval_steps: int
    """Of the plan at the end, between snapshots."""
    promised_loss: float | None
    """Mean over the lives from the third failure on; None: none was decided."""
    promised_band: tuple[float, float] | None
    """90 %, of the loss over as many failures, by the last promise."""
    observed_loss: float
    """From the third failure on."""
    fresh_starts: int
    """Restarts from step 0 after the counted failure."""
    lost_steps: tuple[int, ...]
    plans: int


def main(argv: Sequence[str] | None = None) -> None:
    """Run, judge, publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=2, help="of kills, for each size")
    parser.add_argument("--kills", type=int, default=5, help="of a schedule")
    parser.add_argument("--minutes", type=float, default=20.0, help="that all of it may take")
    parser.add_argument("--sizes", nargs="+", default=["1m", "10m"])
    parser.add_argument("--stretch", type=float, nargs=2, default=[10.0, 40.0],
                        help="least and most training before a kill, seconds")  # fmt: skip
    tiny = {"schedules": 1, "kills": 2, "sizes": ["1m"], "stretch": [1.0, 2.0]}
    parser.add_argument("--keep", help="empty folder for the run directories; else they go")
    given = parse(parser, argv, **tiny)
    found: dict[str, list[Outcome]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the job would train on
    kept = Path(given.keep).absolute() if given.keep else None
    folder = kept or Path(tempfile.mkdtemp(prefix="bench-mind-", dir=os.getcwd()))
    try:
        for number, size in jobs_within(given):
            stretches = drawn(given.kills + 1, *given.stretch, seed=1000 * given.seed + number)
            run = folder / f"{size}-{number}" / "run"  # alone: no other job's failures are known
            one = outcome(RunDirectory.create(run), run_once(run, size, stretches))
            print(f"{size} schedule {number}: {json.dumps(asdict(one))}", flush=True)
            found.setdefault(size, []).append(one)
    finally:
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
    publish(
        "mind", [line for size, all_ in found.items() for line in rows(size, all_)],
        settings={
            **{name: value for name, value in vars(given).items() if name != "keep"},
            "outcomes": {k: [asdict(o) for o in v] for k, v in found.items()},
        },
        smoke=given.smoke,
    )  # fmt: skip


def jobs_within(given: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """(schedule, size) of the next job, while there is time for one more."""
    began_s, longest_s = time.monotonic(), 0.0
    for number in range(given.schedules):
        for size in given.sizes:
            job_began_s = time.monotonic()
            if job_began_s - began_s + longest_s > 60.0 * given.minutes:
                print(f"no time for schedule {number} of {size}", flush=True)
                return
            yield number, size
            longest_s = max(longest_s, time.monotonic() - job_began_s)


def drawn(count: int, least_s: float, most_s: float, *, seed: int) -> tuple[float, ...]:
    """Stretches of training, seconds."""
    chance = random.Random(seed)
    return tuple(chance.uniform(least_s, most_s) for _ in range(count))


def run_once(run: Path, size: str, stretches: Sequence[float]) -> list[End]:
    """Trains, kills after each stretch but the last, and ends the job; the end of each life."""
    script = str(ROOT / "benchmarks" / "kills" / "trainer.py")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AUTOCKPT_", "TORCHELASTIC_"))}
    log = run.with_suffix(".log")
    with log.open("wb") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "autockpt", "run", "--run-dir", str(run), script,
             "--size", size, "--tokens", "16"],
            env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, cwd=run.parent,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    ends: list[End] = []
    try:
        for number, stretch_s in enumerate(stretches):
            pid, began_s = _training(RunDirectory(run), job, number, log)
            time.sleep(max(0.0, began_s + stretch_s - time.monotonic()))
            ends.append(_end(RunDirectory(run)))
            if number + 1 < len(stretches):
                os.kill(pid, signal.SIGKILL)
        job.send_signal(signal.SIGTERM)
        job.wait(END_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    return ends


def _end(run: RunDirectory) -> End:
    decision = run.read_decision()
    if decision is None:
        return End(at_s=time.monotonic(), expected=None)
    shape = decision.inputs.rate_shape if decision.inputs is not None else 1.0
    return End(at_s=time.monotonic(), expected=decision.expected, rate_shape=shape)


def _training(
    run: RunDirectory, job: "subprocess.Popen[bytes]", number: int, log: Path
) -> tuple[int, float]:
    """(process, when its first iteration ended) of the start with this number."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and job.poll() is None:
        events = list(_events(run.rank_telemetry(0)))
        pids = [event.pid for event in events if isinstance(event, t.RunStarted)]
        firsts = [event.at_s for event in events if isinstance(event, t.FirstIterationEnded)]
        if len(firsts) > number and len(pids) > number:
            return pids[-1], firsts[-1]
        time.sleep(POLL_S)
    raise RuntimeError(f"start {number} did not train:\n{log.read_text(errors='replace')[-3000:]}")


def _events(path: Path) -> Iterator[t.Event]:
    """The whole events of a file that is being written."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        yield t.event_from_data(json.loads(line))


def outcome(run: RunDirectory, ends: Sequence[End]) -> Outcome:
    """What the logs of a run say; `ends`: of its lives."""
    events = list(_events(run.rank_telemetry(0)))
    lives = lives_of(events, [end.at_s for end in ends])
    counted = lives[COUNTED_FROM:] or lives[-1:]
    seals = sum(isinstance(event, t.SnapshotSealed) for event in events)
    blocks = [e for e in events if isinstance(e, t.IterationsTimed)]
    stalled_s = sum(block.checkpoint_s for block in blocks)
    slower_s = sum(
        max(0.0, block.total_s - block.count * block.quiet_s) for block in blocks if block.quiet_s
    )
    cost_s = (stalled_s + slower_s) / max(1, seals)
    copies = [e.copy_s for e in events if isinstance(e, t.SnapshotSealed)] or [0.0]
    trained_s, wall_s = kept_of(lives, COUNTED_FROM)
    late_s, late_wall_s = kept_of(lives, PROMISED_FROM)
    best_s, interval = best_fixed(counted, cost_s=cost_s, latency_s=fmean(copies))
    plan, records = run.read_plan(), run.failures()
    promised, band = promised_of(lives, ends)
    return Outcome(
        goodput=trained_s / wall_s,
        best_goodput=best_s / wall_s,
        best_interval_steps=interval,
        interval_steps=plan.snapshot_interval_steps if plan is not None else 0,
        promised_loss=promised,
        promised_band=band,
        observed_loss=1.0 - late_s / late_wall_s,
        fresh_starts=sum(life.first_step == 0 for life in lives[COUNTED_FROM:]),
        lost_steps=tuple(record.lost_steps for record in records),
        plans=1 + sum(isinstance(event, t.PlanChanged) for event in events),
    )


def kept_of(lives: Sequence[Life], first: int) -> tuple[float, float]:
    """(seconds of training that stayed, seconds in all) from the end of the life before `first`."""
    counted = lives[first:] or lives[-1:]
    skipped = len(lives) - len(counted)
    since_s = lives[skipped - 1].ended_s if skipped else lives[0].began_s
    begun = [life.first_step for life in counted]
    ended = [*begun[1:], counted[-1].first_step + counted[-1].steps]
    trained_s = sum(
        (end - begin) * life.iteration_s
        for life, begin, end in zip(counted, begun, ended, strict=True)
    )
    return trained_s, lives[-1].ended_s - since_s


def promised_of(
    lives: Sequence[Life], ends: Sequence[End]
) -> tuple[float | None, tuple[float, float] | None]:
    """(mean promise weighed by time, band of the last) from the third failure on."""
    late = list(zip(lives, ends, strict=True))[PROMISED_FROM:] or [(lives[-1], ends[-1])]
    known = [(life, end.expected) for life, end in late if end.expected is not None]
    if not known:
        return None, None
    total_s = sum(life.ended_s - life.began_s for life, _ in known)
    mean = sum((life.ended_s - life.began_s) * made.waste for life, made in known) / total_s
    return mean, waste_band(known[-1][1], float(len(late)), late[-1][1].rate_shape)


def lives_of(events: Sequence[t.Event], ends: Sequence[float]) -> list[Life]:
    """Of the trainers of a run, oldest first."""
    firsts = [event for event in events if isinstance(event, t.FirstIterationEnded)]
    blocks = [event for event in events if isinstance(event, t.IterationsTimed)]
    nexts_s = [*(first.at_s for first in firsts[1:]), math.inf]
    found = []
    for first, ended_s, next_s in zip(firsts, ends, nexts_s, strict=True):
        begun = first.step - 1
        until_s = min(ended_s + LATE_S, next_s)
        own = [b for b in blocks if first.at_s <= b.at_s < until_s]
        steps = max((b.step for b in own), default=first.step) - begun
        quiet = [b for b in own if b.quiet_s] or [b for b in blocks if b.quiet_s]
        iteration_s = sum(b.quiet_s * b.count for b in quiet) / sum(b.count for b in quiet)
        found.append(
            Life(
                first_step=begun, steps=steps, began_s=first.at_s, ended_s=ended_s,
                iteration_s=iteration_s,
            )
        )  # fmt: skip
    return found


def best_fixed(lives: Sequence[Life], *, cost_s: float, latency_s: float) -> tuple[float, int]:
    """(seconds of training kept, interval) of the fixed interval that keeps most of these lives.

    The last life is ended with notice, so all of it is kept.
    """
    longest = max((life.ended_s - life.began_s) / life.iteration_s for life in lives)
    grid = sorted({max(1, round(1.15**k)) for k in range(80)})
    grid = [steps for steps in grid if steps <= longest] or [1]

    def kept_s(interval: int) -> float:
        total_s = 0.0
        for life in lives[:-1]:
            trained_s = interval * life.iteration_s
            counted_s = max(0.0, life.ended_s - life.began_s - latency_s)
            total_s += trained_s * int(counted_s / (trained_s + cost_s))
        last = lives[-1]
        return total_s + (last.ended_s - last.began_s) / (
            1.0 + cost_s / (interval * last.iteration_s)
        )

    best = max(grid, key=kept_s)
    return kept_s(best), best


def rows(size: str, found: Sequence[Outcome]) -> list[Row]:
    """The figures of one size."""
    ratios = [100.0 * one.goodput / one.best_goodput for one in found]
    off = [100.0 * abs(one.promised_loss - one.observed_loss)
           for one in found if one.promised_loss is not None]  # fmt: skip
    bands = [(one.promised_band, one.observed_loss) for one in found if one.promised_band]
    held = [100.0 * (low <= seen <= high) for (low, high), seen in bands]
    width = [50.0 * (high - low) for (low, high), _ in bands]
    return [
        row(size, "goodput", [100.0 * one.goodput for one in found], "%", statistic=fmean),
        row(size, "over the best fixed in hindsight", ratios, "%", statistic=fmean, at_least=95.0),
        row(size, "restarts from step 0", [float(one.fresh_starts) for one in found], "",
            statistic=max, at_most=0.0),
        row(size, "promise off by", off, "points", statistic=fmean, at_most=3.0),
        row(size, "half of the promised band", width, "points", statistic=fmean),
        row(size, "loss within the band", held, "%", statistic=fmean, at_least=80.0),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
