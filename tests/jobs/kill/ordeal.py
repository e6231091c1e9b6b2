"""One training that is killed again and again until it has finished, and what must hold each time.

The oracle, read from the keeper's telemetry right after a kill: the next start must resume at or
after the newest step that was reported durable, and, where a keeper that knows the rank lived on,
at or after the newest step that was reported memory-committed.  Not where that keeper dies too
before the next trainer has found it: then nobody is left who holds the memory.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autockpt.executors.keeper.launch import keeper_status
from autockpt.values.errors import NoCheckpointError
from tests.conftest import end_keeper, keeper_pids
from tests.jobs.kill.zygote import Zygote
from tests.support import trainings

PATIENCE_S = 60.0
"""No trainer of these tests needs more than a second or two; a loaded machine may."""
SPAWNED_START_S = 0.4
"""From the start of a trainer to its first step, where it starts a keeper."""
SPECS = (
    trainings.JobSpec(steps=30, pace_s=0.004, seed=1),
    trainings.JobSpec(steps=30, pace_s=0.004, seed=2, loader="stateful", optimizer="fused"),
    trainings.JobSpec(steps=30, pace_s=0.004, seed=3, model="tied", scaler=True),
    trainings.JobSpec(steps=30, pace_s=0.004, seed=4, model="odd", optimizer="sgd"),
    trainings.JobSpec(steps=30, pace_s=0.004, seed=5, model="conv", optimizer="fused", forks=True),
)
PLANS = (
    trainings.plan(memory=2, disk=6),
    trainings.plan(memory=2, disk=6, schedule="blocking"),
    trainings.plan(memory=2, disk=6, streaming=False, codec={"moments": "zstd"}),
    trainings.plan(memory=2, disk=4, slots=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Whom to kill, and when."""

    victim: str
    """trainer, keeper, or both."""
    at_step: int | None
    """When the trainer reaches this step; None: counted from its start."""
    after_s: float
    first: str = "keeper"
    """Which of both goes first."""

    def __str__(self) -> str:
        when = "the start" if self.at_step is None else f"step {self.at_step}"
        return f"{self.victim} {1000 * self.after_s:.1f} ms after {when}"


def draw(rng: random.Random, steps: int, *, start_s: float = SPAWNED_START_S) -> Kill:
    """A random kill: a fifth while the process starts, the rest while it trains or ends."""
    victim = rng.choices(["trainer", "keeper", "both"], weights=[5, 3, 4])[0]
    first = rng.choice(["keeper", "trainer"])
    if rng.random() < 0.2:
        return Kill(victim=victim, at_step=None, after_s=rng.uniform(0.0, start_s), first=first)
    at_step = rng.randint(1, steps)
    return Kill(victim=victim, at_step=at_step, after_s=rng.uniform(0.0, 0.02), first=first)


@dataclass(slots=True)
class Ordeal:
    """One run directory, one job, many kills."""

    zygote: Zygote
    spec: trainings.JobSpec
    run_dir: str
    out: Path
    story: list[str] = field(default_factory=list)
    """What happened, for the message of a failure."""
    done: list[Kill] = field(default_factory=list)
    pid: int = 0
    """The newest trainer."""
    durable: int = 0
    """Newest step known to be durable."""
    promised: int = 0
    """Step at or after which the newest trainer must begin."""
    _memory_lost_s: float = 0.0
    in_memory: int = 0
    """Newest step known to be memory-committed in memory that is still held."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every trainer, beside the zygote's."""

    def go(self, kills: Callable[[], Kill | None]) -> str:
        """Starts, kills, starts again until the training ends by itself; its digest."""
        fresh = False
        while True:
            pid = self.pid = self._start(fresh=fresh)
            killed = self._attempt(pid, kills)
            self._check_start(pid)
            fresh = not killed and self._rightly_refused(pid)
            if not killed and not fresh:
                return self._finished(pid)

    def _rightly_refused(self, pid: int) -> bool:
        """All that was ever committed was in memory that is gone: a person must say `fresh`."""
        refused = self.zygote.status(pid, wait_s=PATIENCE_S) == NoCheckpointError.exit_code
        if refused:
            assert not self.promised, self.tale()
            assert "no generation can be restored" in (self.out / "log").read_text()
            self.story.append(f"{pid} refused to start from scratch by itself")
        return refused

    def _start(self, *, fresh: bool) -> int:
        environment = {"AUTOCKPT_FRESH": "1"} if fresh else {}
        trainings.StepCell(self.out / "step").set(0)
        pid = self.start_trainer(**environment)
        self.promised = max(self.durable, self.in_memory)
        self.story.append(f"started {pid}, expecting step >= {self.promised}")
        return pid

    def start_trainer(self, **environment: str) -> int:
        """A process that trains; its pid."""
        data = trainings.spec_data(self.spec)
        return self.zygote.start(data, self.run_dir, self.out, **self.environment, **environment)

    def strike(self, pid: int) -> None:
        """Ends a victim."""
        os.kill(pid, signal.SIGKILL)

    def _attempt(self, pid: int, kills: Callable[[], Kill | None]) -> bool:
        """True when the trainer was killed."""
        cell = trainings.StepCell(self.out / "step")
        began = time.monotonic()
        while (kill := kills()) is not None:
            if not self._wait_for(kill, pid, cell, began):
                return False
            self._carry_out(kill, pid)
            if kill.victim != "keeper":
                return True
        return False

    def _wait_for(self, kill: Kill, pid: int, cell: trainings.StepCell, began: float) -> bool:
        """Waits for the instant; False when the trainer ended before it."""
        while kill.at_step is not None and cell.get() < kill.at_step:
            if self.zygote.status(pid) is not None:
                return False
            assert time.monotonic() < began + PATIENCE_S, f"{kill}: not reached; {self.tale()}"
            time.sleep(0.0005)
        since = began if kill.at_step is None else time.monotonic()
        rest_s = max(0.0, since + kill.after_s - time.monotonic())
        return self.zygote.status(pid, wait_s=rest_s) is None

    def _carry_out(self, kill: Kill, pid: int) -> None:
        keepers = keeper_pids(self.run_dir)
        status = keeper_status(self.run_dir, 0) if kill.victim != "both" else None
        held = status is not None and 0 in status.trainers
        held |= kill.victim == "keeper" and self._began(pid) is not None
        victims = {"trainer": [pid], "keeper": keepers, "both": [*keepers, pid]}[kill.victim]
        if kill.victim == "both" and kill.first == "trainer":
            victims.reverse()
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                self.strike(victim)
        self.done.append(kill)
        for keeper in keepers if kill.victim != "trainer" else []:
            _wait_gone(keeper)
        if kill.victim != "keeper":
            assert self.zygote.status(pid, wait_s=PATIENCE_S) is not None, self.tale()
        if not held:
            self.in_memory, self._memory_lost_s = 0, time.monotonic()
        self._learn()
        if not held and kill.victim == "keeper":
            self.promised = min(self.promised, self.durable)
        self.story.append(
            f"killed {kill} (keepers {keepers}): durable {self.durable}, memory {self.in_memory}"
        )

    def _learn(self) -> None:
        """What has been promised so far, and is not in memory that was lost."""
        path = Path(self.run_dir) / "telemetry" / "keeper-000.jsonl"
        for event in read_events(path):
            if event["event"] == "CheckpointDurable":
                self.durable = max(self.durable, event["step"])
            elif event["event"] == "MemoryCommitted" and event["at_s"] > self._memory_lost_s:
                self.in_memory = max(self.in_memory, event["step"])

    def _check_start(self, pid: int) -> None:
        """The oracle."""
        began = self._began(pid)
        if began is not None:
            self.story.append(f"{pid} resumed at step {began}")
            assert began >= self.promised, (
                f"resumed at step {began}, step {self.promised} was promised; {self.tale()}"
            )

    def _began(self, pid: int) -> int | None:
        """The step that this trainer began with; None: it has not said so."""
        mine = [fact for fact in trainings.said(self.out) if fact["pid"] == pid]
        return next((fact["step"] for fact in mine if fact["event"] == "started"), None)

    def _finished(self, pid: int) -> str:
        status = self.zygote.status(pid, wait_s=PATIENCE_S)
        assert status == 0, f"exit status {status}; {self.tale()}"
        facts = [fact for fact in trainings.said(self.out) if fact["pid"] == pid]
        return str(facts[-1]["digest"])

    def end(self) -> None:
        """Nothing of it survives: first the trainer, which would start another keeper."""
        if self.pid and self.zygote.status(self.pid) is None:
            os.kill(self.pid, signal.SIGKILL)
            self.zygote.status(self.pid, wait_s=PATIENCE_S)
        end_keeper(self.run_dir)

    def tale(self) -> str:
        """Everything a failure needs."""
        log = (self.out / "log").read_text() if (self.out / "log").exists() else ""
        keeper = Path(self.run_dir) / "logs" / "keeper-000.log"
        text = keeper.read_text() if keeper.exists() else ""
        story = "\n  ".join(self.story)
        return f"\n  {story}\n--- trainers\n{log[-3000:]}\n--- keepers\n{text[-3000:]}"


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of a telemetry file; a line that a kill tore is left out."""
    events = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
    return events


def _wait_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.001)
    raise AssertionError(f"pid {pid} survived SIGKILL")
