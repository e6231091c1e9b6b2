"""Five kills through the real launcher: `autockpt run` on two ranks of the example job.

torchelastic notices, restarts both ranks, they restore; the digest at the end is that of a run that
nobody disturbed and that knows nothing of autockpt.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autockpt.executors.keeper.launch import keeper_status
from tests.conftest import end_keeper
from tests.jobs.kill.launched import PATIENCE_S, STEPS, Launch, bare_digest
from tests.jobs.kill.zygote import environment

SEED = int(os.environ.get("KILL_SEED", "5"))


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_five_kills_under_the_launcher_end_in_the_digest_of_a_bare_run(tmp_path: Path) -> None:
    """Replay: KILL_SEED=N pytest tests/jobs/kill/test_launcher.py"""
    rng = random.Random(SEED)
    victims = ["trainer", "keeper", "both", "trainer", rng.choice(["keeper", "both"])]
    rng.shuffle(victims)
    targets = sorted(rng.sample(range(8, STEPS - 8), len(victims)))
    plan = [
        (target, victim, rng.randrange(2)) for target, victim in zip(targets, victims, strict=True)
    ]
    print(f"replay: KILL_SEED={SEED} pytest tests/jobs/kill/test_launcher.py  {plan}")
    launch = Launch(tmp_path)
    try:
        for target, victim, rank in plan:
            launch.wait(lambda t=target: launch.step() >= t, f"step {target}")  # type: ignore[misc]
            instant = time.monotonic() + rng.uniform(0, 0.03)
            launch.wait(lambda t=instant: time.monotonic() >= t, "instant")  # type: ignore[misc]
            launch.kill(victim, rank)
        digest = launch.finish()
    finally:
        launch.end()
    assert digest == bare_digest(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_keeper_of_its_own_container_outlives_that_of_the_training(tmp_path: Path) -> None:
    """`autockpt keeper` beside the run: all else is killed, and memory has the checkpoint."""
    run_dir = str(tmp_path / "run")
    command = [sys.executable, "-m", "autockpt", "keeper", "--run-dir", run_dir]
    launches: list[Launch] = []
    with open(tmp_path / "beside", "wb") as out:
        beside = subprocess.Popen(command, env=environment(), stdout=out, stderr=out)
    try:
        first = wait_for_keeper(run_dir, other_than=0)
        os.kill(first, signal.SIGKILL)
        keeper = wait_for_keeper(run_dir, other_than=first)
        launches.append(Launch(tmp_path))
        launches[0].wait(lambda: launches[0].newest("MemoryCommitted") >= 20, "step 20")
        container = [launches[0].process.pid]
        container += [p.pid for p in psutil.Process(container[0]).children(recursive=True)]
        assert keeper not in container
        for pid in container:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launches[0].process.wait()
        promised = launches[0].newest("MemoryCommitted")
        launches.append(Launch(tmp_path))
        digest = launches[1].finish()
        restored = launches[1].events("keeper-000", "Restored")
        assert {event["source"] for event in restored} == {"memory"}
        assert min(event["step"] for event in restored) >= promised
        beside.terminate()
        assert beside.wait(60) == 0
        assert keeper_status(run_dir, 0) is None
    finally:
        beside.kill()
        beside.wait()
        for launch in launches:
            launch.end()
        end_keeper(run_dir)
    assert digest == bare_digest(tmp_path)


def wait_for_keeper(run_dir: str, *, other_than: int) -> int:
    """The process of the keeper that answers."""
    deadline = time.monotonic() + PATIENCE_S
    while (status := keeper_status(run_dir, 0)) is None or status.pid == other_than:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return status.pid
