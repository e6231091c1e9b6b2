"""How runs end: signal x when x launcher x tier x grace, with real processes.

`make endings` plays all combinations, `make test` a few.  At every end the work that is lost is at
most one interval of what there was time for: with the coming boundary in the grace, none at all.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autockpt.launch.owner import is_alive
from autockpt.run_directory import RunDirectory
from autockpt.values.exit_codes import SAVED_REQUEUE
from autockpt.values.goal import FailureDeclaration, Goal
from autockpt.values.telemetry import CheckpointDurable
from tests.support import trainings
from tests.unit.cli.scripts import environment, warm, write

PATIENCE_S = 240.0
"""For every wait: a machine that does much else at the same time."""
RARE = 1_000_000
"""An interval that no test lasts for, steps."""

SCRIPT = """
import os, sys, time
import torch, autockpt
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
world = int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
ckpt = autockpt.attach(model=model, optimizer=optimizer, run_dir="r")
rank = int(os.environ.get("RANK", "0"))
with open(f"pid-{rank}.tmp", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"pid-{rank}.tmp", f"pid-{rank}")
at = os.open("at", os.O_CREAT | os.O_WRONLY)
slow_from, slow_s = int(sys.argv[1]), float(sys.argv[2])
for step in ckpt.steps(1_000_000):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(slow_s if step >= slow_from else 0.02)
    if rank == 0:
        os.pwrite(at, b"%012d" % (step + 1), 0)
"""

WHEN = {
    "before the first checkpoint": (RARE, RARE, 4),
    "between two checkpoints": (5, 20, 27),
    "while checkpoints are written": (1, 1, 12),
}
"""(memory interval, disk interval, step from which on the signal comes), in steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination."""

    number: int
    when: str
    launcher: str
    """python, run 1, run 2 or torchrun (2 ranks)."""
    tier: str
    """both, disk or memory."""
    notice_s: float | None
    short: bool = False
    """The iteration takes longer than the grace: only what is in memory can be saved."""

    def __str__(self) -> str:
        name = signal.Signals(self.number).name
        notice = "default" if self.notice_s is None else f"{self.notice_s:g} s"
        return f"{name}-{self.launcher}-{self.when}-{self.tier}-{notice}{'-short' * self.short}"

    @property
    def ranks(self) -> int:
        """How many there are."""
        return 2 if self.launcher in ("run 2", "torchrun") else 1

    @property
    def intervals(self) -> tuple[int, int]:
        """(memory, disk), 0: off."""
        memory, disk, _ = WHEN[self.when]
        return 0 if self.tier == "disk" else memory, RARE if self.tier == "memory" else disk


def cases() -> Iterator[Case]:
    """All of them: what is not crossed goes around."""
    signals = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    others = itertools.cycle(itertools.product(("both", "disk", "memory"), (None, 120.0, 40.0)))
    for name, when, launcher in itertools.product(
        signals, WHEN, ("python", "run 1", "run 2", "torchrun")
    ):
        tier, notice_s = next(others)
        yield Case(
            number=getattr(signal, name), when=when, launcher=launcher, tier=tier,
            notice_s=notice_s,
        )  # fmt: skip
    for name, launcher in itertools.product(
        ("SIGTERM", "SIGINT"), ("python", "run 1", "run 2", "torchrun")
    ):
        yield Case(
            number=getattr(signal, name), when="while checkpoints are written",
            launcher=launcher, tier="both", notice_s=5.0, short=True,
        )  # fmt: skip


ALL = tuple(cases())
WARM = "SIGTERM-python-between two checkpoints-disk-120 s"
"""Its processes begin with torch imported; those of all others begin as users' do."""
QUICK = {"SIGINT-run 1-before the first checkpoint-disk-120 s", WARM}


def parameters() -> list[Any]:
    """All, the slow ones marked."""
    marks = {False: [pytest.mark.slow], True: []}
    return [pytest.param(one, id=str(one), marks=marks[str(one) in QUICK]) for one in ALL]


def test_there_are_at_least_sixty_combinations() -> None:
    """And each once."""
    assert len({str(one) for one in ALL}) == len(ALL) >= 60
    assert len(QUICK & {str(one) for one in ALL}) == len(QUICK)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", parameters())
def test_an_end_loses_at_most_one_interval_of_what_was_possible(
    case: Case, new_run: Callable[..., str], tmp_path: Path
) -> None:
    """What is durable at the end, and that all processes of the training are gone."""
    run_dir = new_run("r")
    with started(case, run_dir, tmp_path) as job:
        reached = wait_for(lambda: at_step(tmp_path) >= WHEN[case.when][2], job, tmp_path)
        if case.short:
            wait_for(lambda: at_step(tmp_path) > reached, job, tmp_path)  # a slow one has begun
        ranks = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(case.ranks)]
        before = at_step(tmp_path)
        job.send_signal(case.number)
        code = job.wait(PATIENCE_S)
        wait_for(lambda: not any(map(is_alive, ranks)), None, tmp_path)
        possible = before - 1 if case.short else before
        wait_for(lambda: durable_step(run_dir) >= possible, None, tmp_path)
    said = (tmp_path / "said").read_text()
    assert code in expected_codes(case), said
    if not case.short and case.launcher != "torchrun":
        step = durable_step(run_dir)
        assert f"stopped at step {step}; the checkpoint of step {step} is durable" in said


def expected_codes(case: Case) -> tuple[int, ...]:
    """Of the process that got the signal."""
    announced = case.number in (signal.SIGUSR1, signal.SIGUSR2)
    if case.launcher.startswith("run") and announced:
        saved = (SAVED_REQUEUE,)
        return (*saved, 128 + case.number) if case.short else saved
    if case.launcher != "torchrun":
        return (128 + case.number,)
    # torchrun dies of what it does not know; its ranks see that and end as told.
    return (-case.number if announced else 1,)


@contextmanager
def started(case: Case, run_dir: str, cwd: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The job of a case; whatever is left of it is ended."""
    write(cwd, "s.py", SCRIPT)
    memory, disk = case.intervals
    slow = (str(WHEN[case.when][2]), "12") if case.short else (str(RARE), "0")
    words = [sys.executable, "s.py", *slow]
    if case.launcher.startswith("run"):
        tiers = [("memory.enabled", "false")] if not memory else [("memory.interval", memory)]
        tiers.append(("disk.interval", disk))
        settings = [f"{k}={v} steps" if isinstance(v, int) else f"{k}={v}" for k, v in tiers]
        if case.notice_s is not None:
            settings += ["failures.preemption=1 h", f"failures.notice={case.notice_s:g} s"]
        options = [word for one in ("retune=false", *settings) for word in ("--set", one)]
        words = [
            sys.executable, "-m", "autockpt", "run", "--no-profile", "--run-dir", "r", *options,
            "--nproc-per-node", str(case.ranks), "s.py", *slow,
        ]  # fmt: skip
    else:
        trainings.prepare(run_dir, trainings.plan(memory=memory, disk=disk))
        declared = FailureDeclaration(notice_s=case.notice_s)
        RunDirectory.create(run_dir).write_goal(Goal(failures=declared))
    if case.launcher == "torchrun":
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = [sys.executable, *run, "s.py", *slow]
    begin = warm if str(case) == WARM else contextlib.nullcontext
    with open(cwd / "said", "wb") as said, begin():
        job = subprocess.Popen(
            words, cwd=cwd, env=environment(AUTOCKPT_NO_PROFILE="1"), stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield job
    finally:
        for pid in [job.pid, *(int(path.read_text()) for path in cwd.glob("pid-[01]"))]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        job.wait(PATIENCE_S)


def wait_for(holds: Callable[[], bool], job: "subprocess.Popen[bytes] | None", cwd: Path) -> int:
    """Waits for it while the job lives; the step by then."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        said = (cwd / "said").read_text(errors="replace")
        assert time.monotonic() < deadline, said
        assert job is None or job.poll() is None, said
        time.sleep(0.02)
    return at_step(cwd)


def at_step(cwd: Path) -> int:
    """Iterations that the script has ended."""
    try:
        return int((cwd / "at").read_bytes() or b"0")
    except FileNotFoundError:
        return 0


def durable_step(run_dir: str) -> int:
    """Of the newest durable checkpoint."""
    events = RunDirectory.open(run_dir).events()
    return max((e.step for e in events if isinstance(e, CheckpointDurable)), default=0)
