"""A training attached in the test's own process, with a real keeper beside it.

Each `attach` is a launch of its own, so a second one on the same directory is a restart.
"""

import itertools
import os
import re
from typing import Any, TypeVar

import pytest

import autockpt
from autockpt.executors.storage import catalogue
from autockpt.run_directory import RunDirectory
from autockpt.session import Session
from autockpt.values.generation import Generation
from autockpt.values.goal import Goal, Limits
from autockpt.values.plan import CheckpointPlan
from autockpt.values.telemetry import Event
from autockpt.values.units import parse_size_bytes
from tests.conftest import end_keeper
from tests.support import trainings

PATIENCE_S = 30.0
SPEC = trainings.JobSpec(steps=12)
_LAUNCHES = itertools.count(1)
_FOREIGN = ("AUTOCKPT_", "TORCHELASTIC_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_")
_E = TypeVar("_E", bound=Event)


class Live:
    """One run directory and the trainings of this process on it."""

    def __init__(self, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir = run_dir
        self._environment = monkeypatch
        self._sessions: list[Session] = []
        for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
            monkeypatch.delenv(name)

    def attach(
        self,
        spec: trainings.JobSpec = SPEC,
        plan: CheckpointPlan | None = None,
        goal: Goal | None = None,
        **more: Any,
    ) -> tuple[trainings.Job, Session]:
        """A job, before its first step or where it is resumed; a plan is decided when given."""
        if plan is not None:
            trainings.prepare(self.run_dir, plan)
        self._environment.setenv("AUTOCKPT_LAUNCH_ID", f"launch-{next(_LAUNCHES)}")
        self._environment.setenv("AUTOCKPT_LAUNCHER_PID", str(os.getpid()))
        self._environment.setenv("AUTOCKPT_SAME_JOB", "1")
        job = trainings.build(spec)
        session = autockpt.attach(**{**job.attached, **more}, run_dir=self.run_dir, goal=goal)
        self._sessions.append(session)
        return job, session

    def train(self, spec: trainings.JobSpec = SPEC, plan: CheckpointPlan | None = None) -> str:
        """A whole training; its digest."""
        job, session = self.attach(spec, plan)
        for step, batch in session.batches(spec.steps):
            trainings.train_step(job, step, batch)
            granted(session)
        return trainings.digest(job)

    def leave(self) -> None:
        """Ends sessions without a last checkpoint, then the keeper: the memory tier is gone."""
        for session in self._sessions:
            session.close(final_checkpoint=False)
        self._sessions.clear()
        end_keeper(self.run_dir)

    @property
    def checkpoints(self) -> str:
        """The checkpoint directory."""
        return os.path.join(self.run_dir, "checkpoints")

    def events(self, kind: type[_E]) -> list[_E]:
        """What was told so far."""
        for session in self._sessions:
            session._rank.telemetry.flush()
        return [e for e in RunDirectory.open(self.run_dir).events() if isinstance(e, kind)]

    def durable_steps(self) -> dict[int, str]:
        """Name by step of every generation with a COMMIT that can be read."""
        records = catalogue.list_generations(self.checkpoints)
        return {record.step: record.name for record in records if record.step >= 0}


def room_for_one(live: Live, spec: trainings.JobSpec, plan: CheckpointPlan) -> Goal:
    """A limit on host memory that leaves room for one slot of this job, and not for two."""
    job, session = live.attach(spec, plan, Goal(limits=Limits(host_memory_bytes=4096)))
    link = session._client
    for step, batch in session.batches(5):
        trainings.train_step(job, step, batch)
        if step > 1:
            assert link.wait_until(lambda: bool(link.slots_refused), PATIENCE_S)
    needed = re.search(r"needs (.+?) of host memory", link.slots_refused)
    assert needed is not None
    session.close(final_checkpoint=False)
    return Goal(limits=Limits(host_memory_bytes=int(1.1 * parse_size_bytes(needed[1]))))


def granted(session: Session) -> None:
    """Waits until nothing is under way and the coming boundary can begin its snapshot, if due."""
    step, link, asked = session.step_count + 1, session._client, session._client.saves.asked
    if session.step_count <= session._rank.start_step or link.slots_refused:
        return
    assert link.wait_until(lambda: bool(link.slots or link.slots_refused), PATIENCE_S)
    saves = link.saves
    if asked is not None and asked.generation != session._rank.generation(step):
        former = asked.generation
        assert link.wait_until(
            lambda: saves.memory_committed == former or saves.is_discarded(former), PATIENCE_S
        )
        if asked.disk:  # busy storage keeps its slot
            link.wait_over(former, PATIENCE_S)
    if not session._saver.is_due(step) or link.slots_refused:
        return
    generation = session._rank.generation(step)
    session._saver.ask(generation, disk=session._saver.is_disk_due(step))
    save = saves.get(generation)
    assert save is not None
    assert link.wait_until(lambda: save.state == "granted", PATIENCE_S), save


def durable(session: Session, generation: Generation) -> bool:
    """Whether the trainer was told that this generation is on disk."""
    return session._client.saves.durable == generation
