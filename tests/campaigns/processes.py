"""Real trainers and keepers, killed at random: the end is that of a training nobody disturbed.

Restarts are of three kinds: new processes, parked ones, and the functions of survivors once more.
"""

import logging
import os
import random
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autockpt.executors.storage.catalogue import list_generations, verify_generation
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import Goal
from benchmarks.restart import parked
from tests.campaigns.framework import ROOT, Violation, require
from tests.conftest import end_keeper
from tests.jobs.kill.forked_keepers import FORKED_KEEPERS
from tests.jobs.kill.group import Group, undisturbed
from tests.jobs.kill.launched import Launch, bare_digest
from tests.jobs.kill.ordeal import PLANS, SPAWNED_START_S, SPECS, Kill, Ordeal, draw, read_events
from tests.jobs.kill.restartable import Death, Job, deaths, job, require_exact
from tests.jobs.kill.zygote import Zygote
from tests.support import trainings

KILLS = 10
"""In a case of one rank."""
LAUNCHED_EVERY, LAUNCHED_FROM = 100, 8
"""So often the job is one of two ranks under `autockpt run`, and the launcher among the victims."""
STORED_EVERY, STORED_FROM = 7, 3
"""So often the durable tier is an object store (an emulated S3 in this process)."""
SPAWNED_EVERY = 20
"""So often keepers are started as everybody's are; else they are forked, in milliseconds."""
FORKED_START_S = 0.15
"""From the start of a trainer to its first step, at most."""
LAUNCHED_KILLS = 3
BUCKET = "bucket"
RESTARTABLE_EVERY, RESTARTABLE_FROM = 5, 2
"""So often ranks run a restartable function under `autockpt run`, and survivors go on in it."""
RESTARTABLE_KILLS = 4
RESTARTABLE_S = 300.0
RESTARTABLE_STEPS = 60
PARKED_S = 120.0
"""Of imports beside much else."""
WAIT_S = 60.0
BUDGET_S = 30.0
"""What schedulers leave between SIGTERM and SIGKILL."""
LAYER = Path(__file__).with_name("killed_keeper")
OPERATIONS = 293
"""About as many has the keeper of such a training; fewer when it is slow and saves are skipped."""
STRIDE = 101
"""Few cases are spread over all of them."""


def undisturbed_end(zygote: Zygote, spec: trainings.JobSpec, out: Path) -> str:
    """Digest of a training without autockpt."""
    out.mkdir()
    pid = zygote.start(trainings.spec_data(spec), "", out, attach=False)
    status = zygote.finish(pid, out / "log", wait_s=WAIT_S)
    require(status == 0, (out / "log").read_text())
    return str(trainings.said(out)[-1]["digest"])


class RandomKills:
    """SIGKILL of trainer, keeper, both, or the launcher, at random instants of a training."""

    claim = "after every SIGKILL what was promised comes back; the end is an undisturbed run's"
    distinct: int | None = None

    def __init__(self, scratch: Path) -> None:
        self.executions = 0
        self._scratch, self._zygote = scratch, Zygote()
        self._launched_end = ""
        self._account: dict[str, str] = {}
        self._digests = [
            undisturbed_end(self._zygote, spec, scratch / f"bare-{number}")
            for number, spec in enumerate(SPECS)
        ]

    def run(self, number: int, rng: random.Random) -> str:
        """One training, killed until it ends."""
        if number % LAUNCHED_EVERY == LAUNCHED_FROM:
            return self._launched(rng, warm=number // LAUNCHED_EVERY % 2 == 1)
        forked = number % SPAWNED_EVERY > 0
        which, left = rng.randrange(len(SPECS)), [KILLS]
        out = self._scratch / "case"
        out.mkdir()
        run_dir = trainings.prepare(out / "run", rng.choice(PLANS))
        environment = dict(FORKED_KEEPERS) if forked else {}
        stored = number % STORED_EVERY == STORED_FROM and find_spec("moto") is not None
        if stored:
            environment |= self._server()
            place = Goal(storage_path=f"s3://{BUCKET}/{os.getpid()}-{number}")
            RunDirectory(run_dir).write_goal(place)
        ordeal = Ordeal(self._zygote, SPECS[which], run_dir, out, environment=environment)
        start_s = FORKED_START_S if forked else SPAWNED_START_S

        def next_kill() -> Kill | None:
            left[0] -= 1
            return draw(rng, SPECS[which].steps, start_s=start_s) if left[0] >= 0 else None

        try:
            digest = ordeal.go(next_kill)
            require(digest == self._digests[which], f"another end; {ordeal.tale()}")
            local = Path(run_dir, "checkpoints").exists()
            require(local != stored, f"checkpoints on a disk: {local}; {ordeal.tale()}")
        finally:
            ordeal.end()
            self.executions += len(ordeal.done)
            shutil.rmtree(out, ignore_errors=True)
        where = ", in a store" if stored else ""
        return f"{'forked' if forked else 'spawned'}{where}, {len(ordeal.done)} kills"

    def _server(self) -> dict[str, str]:
        """The account on an emulated S3, which lives as long as this process."""
        if not self._account:
            from moto.server import ThreadedMotoServer

            logging.getLogger("werkzeug").setLevel(logging.ERROR)
            server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
            server.start()
            host, port = server.get_host_and_port()
            url = f"http://{host}:{port}"
            making = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
            urllib.request.urlopen(making, timeout=WAIT_S)
            self._account = {
                "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "NO_PROXY": "127.0.0.1",
            }  # fmt: skip
        return self._account

    def _launched(self, rng: random.Random, *, warm: bool) -> str:
        """The launcher dies once at least; a person starts it again in the same run directory."""
        out = self._scratch / "case"
        out.mkdir()
        self._launched_end = self._launched_end or bare_digest(self._scratch)
        victims = ["launcher"]
        victims += rng.choices(["launcher", "trainer", "keeper", "both"], k=LAUNCHED_KILLS - 1)
        rng.shuffle(victims)
        launch = (WarmLaunch if warm else Launch)(out)
        try:
            steps = sorted(rng.sample(range(14, 140), LAUNCHED_KILLS))
            for victim, at in zip(victims, steps, strict=True):
                launch.wait(lambda at=at: launch.step() >= at, f"step {at}")  # type: ignore[misc]
                launch.wait(lambda: launch.newest("CheckpointDurable") > 0, "durable checkpoint")
                time.sleep(rng.uniform(0.0, 0.03))
                if victim == "launcher":
                    launch.kill_launcher()
                else:
                    if warm:
                        _await_parked(launch)
                    launch.kill(victim, rng.randrange(2))
                self.executions += 1
            require(launch.finish() == self._launched_end, f"another end after {victims}")
        finally:
            launch.end()
            shutil.rmtree(out, ignore_errors=True)
        return f"launched{' warm' * warm}, {LAUNCHED_KILLS} kills"

    def close(self) -> None:
        """The zygote ends with its children."""
        self._zygote.close()


class WarmLaunch(Launch):
    """Parks the ranks of the next start at once."""

    SETTINGS = (*Launch.SETTINGS, "restart.standby=on")


def _await_parked(launch: Launch) -> None:
    """Until a process is parked for each rank; the ranks stand still meanwhile."""
    ranks = [launch.trainer(rank) for rank in (0, 1)]
    deadline = time.monotonic() + PARKED_S
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    while len(parked(launch.process.pid)) < len(ranks):
        require(time.monotonic() < deadline, f"no parked process: {launch.log.read_text()}")
        time.sleep(0.05)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)


class KeeperOperations:
    """A real keeper dies before operation k; its trainer starts another one and trains on."""

    claim = "a keeper killed at any operation loses nothing; the end is an undisturbed run's"
    distinct: int | None = OPERATIONS

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._zygote = scratch, Zygote()
        self._spec = trainings.JobSpec(steps=14, pace_s=0.004, seed=5)
        self._end = undisturbed_end(self._zygote, self._spec, scratch / "bare")

    def run(self, number: int, rng: random.Random) -> str:
        """Operation k of the first keeper, then a restart that resumes the last step."""
        out = self._scratch / "case"
        out.mkdir()
        order = out / "order"
        order.write_text(str(number * STRIDE % OPERATIONS))
        run_dir = trainings.prepare(out / "run", trainings.plan(memory=2, disk=2))
        ordeal = Ordeal(self._zygote, self._spec, run_dir, out)
        environment = {"PYTHONPATH": f"{LAYER}:{ROOT}", "KILLED_KEEPER": str(order)}
        try:
            pid = self._zygote.start(trainings.spec_data(self._spec), run_dir, out, **environment)
            status = self._zygote.finish(pid, out / "log", wait_s=WAIT_S)
            require(status == 0, f"exit status {status}; {ordeal.tale()}")
            require(trainings.said(out)[-1]["digest"] == self._end, f"another end {ordeal.tale()}")
            struck = not order.exists()
            end_keeper(run_dir)
            _require_all_promised(Path(run_dir), ordeal)
        finally:
            ordeal.end()
            shutil.rmtree(out, ignore_errors=True)
        return "killed" if struck else "not reached"

    def close(self) -> None:
        """The zygote ends with its children."""
        self._zygote.close()


def _require_all_promised(run_dir: Path, ordeal: Ordeal) -> None:
    """The newest generation that was called durable is there, and reads back."""
    events = read_events(run_dir / "telemetry" / "keeper-000.jsonl")
    durable = [event["step"] for event in events if event["event"] == "CheckpointDurable"]
    whole = [
        record.step
        for record in list_generations(str(run_dir / "checkpoints"))
        if record.step >= 0 and verify_generation(str(run_dir / "checkpoints"), record.name).ok
    ]
    require(
        max(whole, default=0) >= max(durable, default=0),
        f"durable {durable}, whole {whole}; {ordeal.tale()}",
    )


class Terminated:
    """SIGTERM at a random instant of a training that checkpoints to memory only."""

    claim = "within its budget after SIGTERM what was in memory is durable, and the trainer is gone"
    distinct: int | None = None

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._zygote = scratch, Zygote()
        self._spec = trainings.JobSpec(steps=10_000, pace_s=0.004, seed=6)

    def run(self, number: int, rng: random.Random) -> str:
        """One training; everything is read from what it told before the signal."""
        out = self._scratch / "case"
        out.mkdir()
        run_dir = trainings.prepare(out / "run", trainings.plan(memory=2, disk=100_000))
        ordeal = Ordeal(self._zygote, self._spec, run_dir, out)
        events, cell = (
            Path(run_dir, "telemetry", "keeper-000.jsonl"),
            trainings.StepCell(out / "step"),
        )
        try:
            ordeal.pid = self._zygote.start(trainings.spec_data(self._spec), run_dir, out)
            at = rng.randint(4, 40)
            _until(lambda: cell.get() >= at and bool(_steps(events, "MemoryCommitted")), ordeal)
            time.sleep(rng.uniform(0.0, 0.02))
            promised, began = max(_steps(events, "MemoryCommitted")), time.monotonic()
            os.kill(ordeal.pid, signal.SIGTERM)
            _until(lambda: self._zygote.status(ordeal.pid) is not None, ordeal)
            _until(lambda: max(_steps(events, "CheckpointDurable"), default=0) >= promised, ordeal)
            require(time.monotonic() - began < BUDGET_S, f"not within {BUDGET_S} s {ordeal.tale()}")
            end_keeper(run_dir)
            _require_all_promised(Path(run_dir), ordeal)
        finally:
            ordeal.end()
            shutil.rmtree(out, ignore_errors=True)
        return "durable"

    def close(self) -> None:
        """The zygote ends with its children."""
        self._zygote.close()


def _steps(events: Path, kind: str) -> list[int]:
    return [event["step"] for event in read_events(events) if event["event"] == kind]


def _until(holds: Callable[[], bool], ordeal: Ordeal) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        require(time.monotonic() < deadline, f"not reached; {ordeal.tale()}")
        time.sleep(0.005)


class ExactRanks:
    """Two to four ranks with DDP; one, some or all are killed, with or without the keeper."""

    claim = "ranks that were killed together end to the bit where undisturbed ones do"
    distinct: int | None = None

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._zygote = scratch, Zygote()
        self._ends: dict[int, list[str]] = {}
        self._whole: dict[int, Job] = {}
        """Restartable jobs that nobody disturbed, by number of ranks."""

    def run(self, number: int, rng: random.Random) -> str:
        """One job; the number of its ranks goes around."""
        ranks = 2 + number % 3
        if number % RESTARTABLE_EVERY == RESTARTABLE_FROM:
            return self._restartable(rng, ranks)
        spec = trainings.JobSpec(
            steps=40, pace_s=0.01, seed=11, ddp=True, optimizer="fused", model="conv", forks=True
        )
        if ranks not in self._ends:
            bare = self._scratch / f"bare-{ranks}"
            self._ends[ranks] = undisturbed(self._zygote, spec, bare, ranks=ranks)
        folder = self._scratch / "case"
        group = Group(self._zygote, spec, folder, ranks=ranks)
        group.run_dir = trainings.prepare(folder / "run", trainings.plan(memory=2, disk=6))
        kills = rng.randint(1, 3)
        try:
            self._play(group, rng, kills)
            require(group.finish() == self._ends[ranks], f"another end; {group.tale()}")
        finally:
            group.end()
            shutil.rmtree(folder, ignore_errors=True)
        return f"{ranks} ranks, {kills} kills"

    def _restartable(self, rng: random.Random, ranks: int) -> str:
        """Survivors run their function again; a rank may die again while all start again."""
        planned = deaths(rng, ranks, RESTARTABLE_KILLS)
        again = rng.randrange(1, len(planned) - 1)
        place, rank = rng.choice(["call", "attach"]), rng.randrange(ranks)
        planned[again] = Death(rank=rank, place=place, after_s=0.0)
        standby = rng.choice(["on", "off"])
        bare, folder = self._scratch / f"restartable-{ranks}", self._scratch / "case"
        if ranks not in self._whole:
            with job(bare, RESTARTABLE_STEPS, ranks=ranks) as whole:
                whole.finish(RESTARTABLE_S)
            self._whole[ranks] = whole
        settings: Any = {"ranks": ranks, "standby": standby, "deaths": planned}
        try:
            with job(folder, RESTARTABLE_STEPS, **settings) as killed:
                killed.finish(RESTARTABLE_S)
            require_exact(killed, self._whole[ranks])
            starts = [one for rank in range(ranks) for one in killed.starts(rank)]
        except AssertionError as error:
            raise Violation(f"{planned}: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        same = "same" in [one["process"] for one in starts]
        return f"{ranks} ranks, {'in their' if same else 'in new'} processes"

    def _play(self, group: Group, rng: random.Random, kills: int) -> None:
        group.start()
        for _ in range(kills):
            # A durable checkpoint first: else a person would have to say `fresh`.
            group.wait_durable(6)
            group.wait_step(min(30, max(group.started_at()) + rng.randint(1, 8)))
            time.sleep(rng.uniform(0.0, 0.02))
            victims = rng.sample(range(group.ranks), rng.randint(1, group.ranks))
            keeper = rng.random() < 0.4
            group.kill(*victims, keeper=keeper)
            durable = max(event["step"] for event in group.events("CheckpointDurable"))
            group.start()
            group.wait_step(1)
            resumed = min(group.started_at())
            require(resumed >= durable, f"resumed at {resumed}, {durable} durable; {group.tale()}")

    def close(self) -> None:
        """The zygote ends with its children."""
        self._zygote.close()
