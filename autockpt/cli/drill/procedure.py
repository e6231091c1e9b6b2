"""How each fault is caused on a running job, and how long what follows is waited for."""

import json
import os
import random
import signal
import time
from collections.abc import Callable

from autockpt.cli.drill.fault import Fault
from autockpt.cli.drill.job import (
    DrilledJob,
    DrillError,
    largest_shard_bytes,
    stopped,
    writing_at_most,
)
from autockpt.cli.drill.outcome import (
    Outcome,
    failed,
    interval_s,
    is_over,
    is_ready,
    outcome,
    promise,
)
from autockpt.policies.default_plan import plan_without_profile
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan
from autockpt.values.telemetry import CheckpointDurable, FirstIterationEnded, IterationsTimed
from autockpt.values.units import format_duration

LATEST_S = 5.0
"""A fault comes at a random instant, at most so long after the job is ready for it."""


class Drill:
    """The faults on one job, one after another."""

    def __init__(self, job: DrilledJob, instants: random.Random, patience_s: float) -> None:
        self._job, self._instants, self._patience_s = job, instants, patience_s
        self._since_s = time.monotonic()
        """End of the last fault: earlier events do not make the job ready."""

    def cause(self, fault: Fault) -> Outcome:
        """Wait until the job is ready for the fault, cause it, and see what follows.

        Raises DrillError where the job does not get ready: no fault was caused.
        """
        run, plan = self._job.run, self._plan
        self._job.wait_for(
            lambda events: is_ready(fault, events, self._since_s, plan()),
            self._checkpoint_patience_s(),
            f"a checkpoint was held before the fault {fault.name!r}",
        )
        time.sleep(self._instants.uniform(0.0, LATEST_S))
        promised = promise(fault, plan(), run.read_decision(), restarts=self._restarts)
        at_s = time.monotonic()
        try:
            note = _CAUSES[fault.name](self, fault, at_s)
        except DrillError as error:
            return failed(fault, promised, str(error))
        finally:
            self._since_s = time.monotonic()
        return outcome(fault, promised, run.events(), at_s, note=note)

    def trained(self) -> int:
        """End the job with a checkpoint; its step.  Raises DrillError where there is none."""
        self._job.end(self._patience_s)
        step = self._job.run.durable_step()
        if step is None:
            raise DrillError("the job ended without a durable checkpoint")
        return step

    def _rank(self, fault: Fault, at_s: float) -> str:
        _, pid = self._drawn()
        os.kill(pid, signal.SIGKILL)
        self._see(fault, at_s)
        return ""

    def _keeper(self, fault: Fault, at_s: float) -> str:
        pid = self._job.keeper()
        if pid is None:
            raise DrillError("no keeper answers")
        os.kill(pid, signal.SIGKILL)
        self._see(fault, at_s)
        again_s = time.monotonic() - at_s
        return f"training went on; a checkpoint was held again after {format_duration(again_s)}"

    def _node(self, fault: Fault, at_s: float) -> str:
        self._job.kill()
        self._job.start()
        self._see(fault, at_s)
        return ""

    def _end(self, fault: Fault, at_s: float) -> str:
        self._job.end(self._patience_s)
        self._job.start()
        self._see(fault, at_s)
        return ""

    def _stuck(self, fault: Fault, at_s: float) -> str:
        rank, pid = self._drawn()
        known = self._incidents()
        with stopped(pid):
            self._job.wait_for(
                lambda events: bool(self._incidents() - known),
                self._patience_s,
                f"rank {rank} stood still, and was named",
            )
            named_s = time.monotonic() - at_s
        said = self._sentence((self._incidents() - known).pop())
        self._see(fault, time.monotonic())
        return f"named after {format_duration(named_s)}: {said}"

    def _disk_full(self, fault: Fault, at_s: float) -> str:
        pid = self._job.keeper()
        nbytes = largest_shard_bytes(self._job.run.checkpoints())
        if pid is None or not nbytes:
            raise DrillError("no keeper answers, or no checkpoint is on disk")
        with writing_at_most(pid, nbytes // 2):
            self._see(fault, at_s)
            told_s = time.monotonic() - at_s
            self._see_steps()
        lifted_s = time.monotonic()
        self._job.wait_for(
            lambda events: any(
                isinstance(e, CheckpointDurable) and e.at_s > lifted_s for e in events
            ),
            self._patience_s,
            "a checkpoint was durable again",
        )
        again_s = time.monotonic() - lifted_s
        return (
            f"training went on; told after {format_duration(told_s)}; durable again "
            f"{format_duration(again_s)} after there was room"
        )

    def _see(self, fault: Fault, at_s: float) -> None:
        self._job.wait_for(
            lambda events: is_over(fault, events, at_s, self._restarts),
            self._checkpoint_patience_s(),
            f"what follows ({fault.follows})",
        )

    def _see_steps(self) -> None:
        at_s = time.monotonic()
        self._job.wait_for(
            lambda events: any(
                isinstance(e, IterationsTimed | FirstIterationEnded) and e.at_s > at_s
                for e in events
            ),
            self._patience_s,
            "training went on",
        )

    def _drawn(self) -> tuple[int, int]:
        ranks = self._job.ranks()
        if not ranks:
            raise DrillError("no rank of the job lives")
        return self._instants.choice(list(ranks.items()))

    def _checkpoint_patience_s(self) -> float:
        """Beside the patience, the plan's own interval: the next checkpoint comes no earlier."""
        run = self._job.run
        profile = run.read_profile()
        known_s = 0.0 if profile is None else profile.iteration_s.p50
        return self._patience_s + interval_s(run.events(), self._plan(), known_s)

    def _plan(self) -> CheckpointPlan:
        return self._job.run.read_plan() or plan_without_profile(self._goal)

    @property
    def _goal(self) -> Goal:
        return self._job.run.read_goal() or Goal()

    @property
    def _restarts(self) -> bool:
        return self._goal.restart.stuck == "restart"

    def _incidents(self) -> set[str]:
        try:
            return set(os.listdir(self._job.run.path / "incidents"))
        except OSError:
            return set()

    def _sentence(self, name: str) -> str:
        path = self._job.run.path / "incidents" / name / "incident.json"
        try:
            return str(json.loads(path.read_text())["sentence"])
        except (OSError, ValueError, LookupError):
            return str(path.parent)


_CAUSES: dict[str, Callable[[Drill, Fault, float], str]] = {
    "rank": Drill._rank,
    "keeper": Drill._keeper,
    "node": Drill._node,
    "end": Drill._end,
    "stuck": Drill._stuck,
    "disk-full": Drill._disk_full,
}


def differences(job: DrilledJob, step: int, patience_s: float) -> str:
    """Train once more without faults up to `step`, and compare; "": every byte is equal.

    Raises DrillError where the run without faults does not get there.
    """
    from autockpt.integrations.formats.tree.diff import compare
    from autockpt.integrations.formats.tree.loading import opened

    run = RunDirectory(job.run.path.with_name(f"{job.run.path.name}-undisturbed"))
    every = ["--set", f"disk.interval={step} steps", "--set", "retune=false"]
    with DrilledJob(run, [*job.options, *every], job.script) as other:
        other.wait_for(
            lambda events: any(isinstance(e, CheckpointDurable) and e.step == step for e in events),
            patience_s + step * _seconds_a_step(job),
            f"step {step} of the run without faults",
        )
        its = run.newest_durable()
    ours = job.run.newest_durable()
    if ours is None or its is None or not ours.step == its.step == step:
        raise DrillError(f"step {step} is not the newest durable checkpoint of both runs")
    mine = os.path.join(job.run.checkpoints(), ours.name)
    clean = os.path.join(run.checkpoints(), its.name)
    with opened(mine) as left, opened(clean) as right:
        found = compare(left.tree, right.tree, tell=lambda nbytes: None)
    if found.equal:
        return ""
    return (
        f"{len(found.differences)} values differ from a run without faults at step {step}; "
        f"`autockpt diff {mine} {clean}` lists them. A job that is not deterministic differs too: "
        "run it twice to know"
    )


def _seconds_a_step(job: DrilledJob) -> float:
    timed = [e for e in job.run.events() if isinstance(e, IterationsTimed)]
    count = sum(e.count for e in timed)
    return 3.0 * sum(e.total_s + e.checkpoint_s for e in timed) / count if count else 1.0
