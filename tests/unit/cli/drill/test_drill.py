"""Drills: real faults on a real job, and how their outcomes are judged."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autockpt.cli.drill.fault import FAULTS
from autockpt.cli.drill.outcome import Promise, interval_s, is_over, is_ready, outcome, promise
from autockpt.values.telemetry import (
    CheckpointDurable,
    Event,
    FirstIterationEnded,
    IterationsTimed,
    MemoryCommitted,
    PersistFailed,
    Restored,
    RunStarted,
)
from tests.support import trainings
from tests.unit.cli.scripts import autockpt, environment, python, write

SCRIPT = """
import time, torch, autockpt
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer)
for step in ckpt.steps(1_000_000):
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    time.sleep(0.02)
"""
OPTIONS = ("--no-profile", "--set", "memory.interval=5 steps", "--set", "disk.interval=20 steps")


def restored(*, at_s: float, rank: int = 0, lost_steps: int, lost_s: float) -> Restored:
    """A rank that went on from memory after 2 s."""
    return Restored(
        at_s=at_s, rank=rank, generation="step 100 (term 1)", step=100, source="memory",
        bytes=1, restore_s=0.1, lost_steps=lost_steps, lost_s=lost_s, down_s=2.0,
    )  # fmt: skip


def test_a_checkpoint_is_waited_for_as_long_as_the_plan_takes() -> None:
    """By the newest iterations of the job, else by its profile's."""
    plan = trainings.plan(memory=5, disk=20)
    assert interval_s([], plan, 0.5) == 10.0

    def block(total_s: float) -> IterationsTimed:
        return IterationsTimed(at_s=1.0, rank=0, step=4, count=4, total_s=total_s, checkpoint_s=0.0,
                               quiet_s=0.0, busy_s=0.0)  # fmt: skip

    assert interval_s([block(400.0), *[block(8.0)] * 10], plan, 0.5) == 40.0


def test_the_promise_is_that_of_the_tier_that_survives() -> None:
    """Memory for a rank, the disk for a node; nothing is lost where training does not stop."""
    plan = trainings.plan(memory=5, disk=20)
    lost = {
        name: promise(fault, plan, None, restarts=False).lost_steps
        for name, fault in FAULTS.items()
    }
    assert lost == {"rank": 10, "keeper": 0, "node": 40, "end": 0, "stuck": 0, "disk-full": 0}
    assert promise(FAULTS["stuck"], plan, None, restarts=True).lost_steps == 10
    off = trainings.plan(memory=0, disk=20)
    assert promise(FAULTS["rank"], off, None, restarts=False).lost_steps == 40


@pytest.mark.parametrize(
    ("lost_steps", "lost_s", "verdict"),
    [(10, 1.0, "kept"), (11, 1.0, "broken"), (10, 30.0, "broken"), (0, 0.0, "kept")],
)
def test_the_worst_rank_is_judged(lost_steps: int, lost_s: float, verdict: str) -> None:
    """By lost iterations and by time; what happened before the fault does not count."""
    events = [
        restored(at_s=1.0, lost_steps=999, lost_s=99.0),
        restored(at_s=6.0, lost_steps=0, lost_s=0.0),
        restored(at_s=6.1, rank=1, lost_steps=lost_steps, lost_s=lost_s),
    ]
    promised = Promise(lost_steps=10, recovery_s=10.0)
    found = outcome(FAULTS["rank"], promised, events, 5.0)
    assert (found.verdict, found.lost_steps, found.recovery_s) == (
        verdict, lost_steps, lost_s + 2.0,
    )  # fmt: skip


def test_a_fault_waits_for_what_it_is_about() -> None:
    """For a checkpoint of the tier since the last fault; over when every rank iterates again."""
    plan = trainings.plan(memory=5, disk=20)
    trained = IterationsTimed(
        at_s=2.0, rank=0, step=9, count=9, total_s=1.0, checkpoint_s=0.0, quiet_s=0.1, busy_s=0.0
    )
    held = MemoryCommitted(at_s=2.0, rank=-1, generation="g", step=5, latency_s=0.1)
    durable = CheckpointDurable(
        at_s=2.0, rank=-1, generation="g", step=5, bytes=1, stored_bytes=1, latency_s=0.1,
        write_s=0.1,
    )  # fmt: skip
    seen: list[Event] = [trained, held]
    assert is_ready(FAULTS["rank"], seen, 1.0, plan)
    assert not is_ready(FAULTS["rank"], seen, 3.0, plan)
    assert not is_ready(FAULTS["node"], seen, 1.0, plan)
    assert is_ready(FAULTS["node"], [*seen, durable], 1.0, plan)
    started = [
        RunStarted(
            at_s=4.0, rank=rank, wall="", run_id="r", term=1, world_size=2, pid=rank, plan_id="p",
            plan_version=1, state_bytes=1, restart_count=1,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    back = [FirstIterationEnded(at_s=5.0, rank=rank, step=6) for rank in (0, 1)]
    assert not is_over(FAULTS["rank"], [*seen, *started, back[0]], 3.0, restarts=False)
    assert is_over(FAULTS["rank"], [*seen, *started, *back], 3.0, restarts=False)
    full = PersistFailed(at_s=4.0, rank=-1, generation="g", step=6, reason="no room")
    assert is_over(FAULTS["disk-full"], [full], 3.0, restarts=False)
    assert not is_over(FAULTS["disk-full"], [full], 5.0, restarts=False)


@pytest.mark.slow
def test_a_killed_rank_comes_back_as_promised(tmp_path: Path) -> None:
    """The command as a user types it; nothing of the job lives afterwards."""
    write(tmp_path, "s.py", SCRIPT)
    done = python(  # cold: ranks are found by their environment in the process table
        "-m", "autockpt", "drill", "--json", "--run-dir", "d", "--fault", "rank", *OPTIONS, "s.py",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["outcomes"]
    assert (one["fault"], one["source"], one["verdict"]) == ("rank", "memory", "kept")
    assert one["lost_steps"] <= 10


def test_a_directory_that_is_there_is_refused(tmp_path: Path) -> None:
    """A drill kills what runs in it."""
    write(tmp_path, "s.py", SCRIPT)
    (tmp_path / "mine").mkdir()
    done = autockpt("drill", "--run-dir", "mine", "s.py", cwd=tmp_path)
    assert done.returncode == 78
    assert "a drill needs a directory of its own" in done.stderr


def test_a_job_that_does_not_train_is_no_broken_promise(tmp_path: Path) -> None:
    """Its own output is shown."""
    write(tmp_path, "s.py", "raise RuntimeError('no data here')")
    done = autockpt("drill", "--run-dir", "d", "--fault", "rank", "s.py", cwd=tmp_path)
    assert done.returncode == 69
    assert "no data here" in done.stderr


@pytest.mark.slow
def test_a_drill_that_is_killed_ends_its_job(tmp_path: Path) -> None:
    """Launcher and ranks would train for ever: its script has a million steps."""
    script = write(tmp_path, "s.py", SCRIPT)
    argv = [sys.executable, "-m", "autockpt", "drill", "--run-dir", "d", *OPTIONS, str(script)]
    drill = subprocess.Popen(
        argv, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def ranks() -> list[list[str]]:
        """Command lines of launcher and ranks."""
        words = (p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"]))
        return [w for w in words if str(script) in w and "drill" not in w]

    deadline = time.monotonic() + 120
    while not any("autockpt.cli.script_runner" in words for words in ranks()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    drill.kill()
    drill.wait()
    while ranks():
        assert time.monotonic() < deadline, ranks()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_fault_is_survived_to_the_byte(tmp_path: Path) -> None:
    """All of them on one job of two ranks, and a run without faults beside it."""
    source = SCRIPT.replace(
        "optimizer =", "torch.distributed.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(model)\noptimizer ="
    )  # fmt: skip
    write(tmp_path, "s.py", source)
    argv = ("drill", "--json", "--exact", "--run-dir", "d", "--nproc-per-node", "2", *OPTIONS)
    done = python("-m", "autockpt", *argv, "s.py", cwd=tmp_path, timeout_s=840)
    body = json.loads(done.stdout)
    assert done.returncode == 0, (body, done.stderr)
    assert body["equal"]
    assert {one["fault"]: one["verdict"] for one in body["outcomes"]} == dict.fromkeys(
        FAULTS, "kept"
    )
