"""Two launchers with one run directory on one machine: a job on two nodes, and what may die in it.

The digest of the last state must be that of `torchrun` with two ranks and no autockpt at all.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import end_keeper, keeper_pids

ROOT = Path(__file__).resolve().parents[2]
STEPS = 120
TRAINING = ("examples/gpt/train.py", "--size", "tiny", "--steps", str(STEPS), "--digest",
            "--threads", "1", "--text-bytes", "200000")  # fmt: skip
PATIENCE_S = 120.0


def environment() -> dict[str, str]:
    """One thread everywhere, this checkout, nothing of an outer launcher."""
    foreign = ("RANK", "WORLD_SIZE", "SLURM_", "TORCHELASTIC", "AUTOCKPT_", "LOCAL_", "MASTER_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class TwoNodes:
    """A job of two launchers with a rank each."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = str(folder / "run")
        self._logs = [folder / f"launcher-{node}.log" for node in range(2)]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.launchers = [self._launch(node, port) for node in range(2)]

    def _launch(self, node: int, port: int) -> "subprocess.Popen[bytes]":
        command = [
            sys.executable, "-m", "autockpt", "run", "--no-profile", "--nnodes", "2",
            "--nproc-per-node", "1", "--node-rank", str(node), "--rdzv-id", "two-nodes",
            "--rdzv-endpoint", f"127.0.0.1:{port}", "--run-dir", self.run_dir,
            "--set", "memory.interval=3 steps", "--set", "disk.interval=15 steps", *TRAINING,
        ]  # fmt: skip
        with self._logs[node].open("wb") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def events(self, writer: str, name: str) -> list[dict[str, Any]]:
        """Events of one kind in one telemetry file; a line that a kill tore is left out."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            text = Path(self.run_dir, "telemetry", f"{writer}.jsonl").read_text()
            for line in text.splitlines():
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if event["event"] == name:
                        found.append(event)
        return found

    def durable(self, node: int) -> int:
        """Newest step that this node's keeper knows to be durable."""
        return max((e["step"] for e in self.events(f"keeper-{node:03d}", "PersistCommitted")),
                   default=0)  # fmt: skip

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Waits for something to happen while the job runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"{what} did not happen; {self.tale()}"
            assert any(x.poll() is None for x in self.launchers), f"ended before {what}"
            time.sleep(0.02)

    def finish(self) -> str:
        """The digest that rank 0 printed."""
        for launcher in self.launchers:
            assert launcher.wait(timeout=PATIENCE_S) == 0, self.tale()
        # The launchers wait for their keepers; those for one another.
        assert not [pid for node in range(2) for pid in keeper_pids(self.run_dir, node)]
        found = re.findall(r"^digest: (\w+)$", "".join(x.read_text() for x in self._logs), re.M)
        assert len(found) == 1, self.tale()
        return str(found[0])

    def tale(self) -> str:
        """Everything a failure needs."""
        files = [*self._logs, *sorted(Path(self.run_dir, "logs").glob("keeper-*.log"))]
        return "".join(f"\n--- {x.name}\n{x.read_text()[-3000:]}" for x in files if x.exists())

    def end(self) -> None:
        """Ends what is left of it."""
        trainers = [e["pid"] for r in range(2) for e in self.events(f"rank-{r:05d}", "RunStarted")]
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()
                for pid in trainers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        end_keeper(self.run_dir, nodes=2)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TwoNodes]:
    """A job that has just been started."""
    nodes = TwoNodes(tmp_path)
    yield nodes
    nodes.end()


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """Digest of two ranks on one node, without autockpt."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *TRAINING,
               "--no-checkpoint"]  # fmt: skip
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    found = re.search(r"^digest: (\w+)$", ended.stdout, re.M)
    assert found, ended.stderr[-3000:]
    return found[1]


def _kill_keeper(job: TwoNodes, node: int) -> None:
    """Kills it and waits for its successor."""
    (before,) = keeper_pids(job.run_dir, node)
    os.kill(before, signal.SIGKILL)
    job.wait(
        lambda: any(pid != before for pid in keeper_pids(job.run_dir, node)), f"keeper {node} again"
    )


@pytest.mark.timeout(200)
def test_training_and_commits_go_on_when_keepers_die_in_turn(
    job: TwoNodes, undisturbed: str
) -> None:
    """First node 1's keeper, then the one that coordinates: the next commits are of both nodes."""
    job.wait(lambda: job.durable(1) > 0, "a commit")
    _kill_keeper(job, 1)
    before = job.durable(0)
    job.wait(lambda: job.durable(0) > before and job.durable(1) > before, "a commit after that")
    _kill_keeper(job, 0)
    before = job.durable(1)
    job.wait(lambda: job.durable(0) > before and job.durable(1) > before, "a commit after that")
    assert job.finish() == undisturbed, job.tale()
    assert job.durable(0) == job.durable(1) == STEPS
    for rank in range(2):
        assert len(job.events(f"rank-{rank:05d}", "RunStarted")) == 1, "nobody restarted"


@pytest.mark.timeout(200)
def test_a_killed_rank_makes_both_nodes_resume_from_memory(job: TwoNodes, undisturbed: str) -> None:
    """SIGKILL of the trainer on node 1: one decision for both, newest state, nothing differs."""
    job.wait(lambda: job.durable(1) > 0, "a commit")
    (started,) = job.events("rank-00001", "RunStarted")
    os.kill(started["pid"], signal.SIGKILL)
    promised = max(event["step"] for event in job.events("keeper-001", "MemoryCommitted"))
    assert job.finish() == undisturbed, job.tale()
    for node in range(2):
        (restored,) = job.events(f"keeper-{node:03d}", "Restored")
        assert restored["source"] == "memory", job.tale()
        assert restored["step"] >= promised, job.tale()
    assert job.durable(0) == job.durable(1) == STEPS
