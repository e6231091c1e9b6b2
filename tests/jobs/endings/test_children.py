"""A signal that ends a training leaves it the processes that its last checkpoint needs.

torchrun, terminals and `timeout` signal a whole group of processes.  Workers of a loader would end,
torch would raise in the training thread, and accumulated gradients would lack their last batches.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autockpt.launch.owner import is_alive
from tests.jobs.endings.test_matrix import PATIENCE_S, RARE, durable_step
from tests.support import trainings
from tests.unit.cli.scripts import environment

SCRIPT = """
import multiprocessing, os, subprocess, sys, time

import torch

import autockpt

ACCUMULATED, METHOD = int(sys.argv[1]), sys.argv[2]


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((4,), float(index % 7))


def write(name, pids):
    with open("new", "w") as file:
        file.write(" ".join(map(str, pids)))
    os.rename("new", name)


if __name__ == "__main__":
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = torch.utils.data.DataLoader(
        Numbers(), 2, num_workers=2, multiprocessing_context=METHOD
    )
    ckpt = autockpt.attach(model=model, optimizer=optimizer, data=loader, run_dir="r")
    child = subprocess.Popen(["sleep", "600"])
    for number, batch in enumerate(loader, 1):
        model(batch).sum().backward()
        if number % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()
        if number == min(ACCUMULATED, 20) + 5:
            workers = [worker.pid for worker in multiprocessing.active_children()]
            write("pids", [os.getpid(), *workers, child.pid])
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline:
                pass  # an iteration of Python code, in which torch may raise
        ckpt.step()
"""

SPAWNED = """
import os, socket, time

import torch

import autockpt


def train(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    ckpt = autockpt.attach(model=model, optimizer=optimizer, run_dir="r")
    for step in ckpt.steps(1_000_000):
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        if step == 24 and rank == 0:
            with open("new", "w") as file:
                file.write(f"{os.getppid()} {os.getpid()}")
            os.rename("new", "pids")
        for _ in range(50 if step >= 24 else 2):
            time.sleep(0.01)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch.multiprocessing.spawn(train, (port,), nprocs=2)
"""

RUN = ["-m", "autockpt", "run", "--no-profile", "--run-dir", "r"]
SETTINGS = [f"{tier}.interval={RARE} steps" for tier in ("memory", "disk")]
LAUNCHERS = {
    "run": [*RUN, *(word for one in ("retune=false", *SETTINGS) for word in ("--set", one))],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"],
    "python": [],
}


@contextmanager
def training(
    launcher: str, cwd: Path, *arguments: str, script: str = SCRIPT
) -> Iterator[tuple["subprocess.Popen[bytes]", list[int]]]:
    """The launcher's process, and other processes of the job.

    Ranks are within an iteration for another half second.
    """
    (cwd / "job.py").write_text(script)
    if launcher != "run":
        trainings.prepare(str(cwd / "r"), trainings.plan(memory=RARE, disk=RARE))
    words = [*LAUNCHERS[launcher], "job.py", *arguments]
    with open(cwd / "said", "wb") as said:
        job = subprocess.Popen(
            [sys.executable, *words], cwd=cwd, env=environment(AUTOCKPT_NO_PROFILE="1"),
            stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    pids: list[int] = []
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (cwd / "pids").exists():
            assert time.monotonic() < deadline, (cwd / "said").read_text()
            assert job.poll() is None, (cwd / "said").read_text()
            time.sleep(0.02)
        pids = [int(word) for word in (cwd / "pids").read_text().split()]
        yield job, pids
    finally:
        for pid in [job.pid, *pids]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        job.wait(PATIENCE_S)


def require_gone(pids: list[int], most_s: float = PATIENCE_S) -> None:
    """Workers look every five seconds whether their trainer lives."""
    deadline = time.monotonic() + most_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("launcher", "number", "method"),
    [
        ("run", signal.SIGTERM, "fork"),
        pytest.param("run", signal.SIGINT, "fork", marks=pytest.mark.slow),
        ("torchrun", signal.SIGTERM, "fork"),
        pytest.param("python", signal.SIGTERM, "spawn", marks=pytest.mark.slow),
        ("python", signal.SIGTERM, "forkserver"),
        ("python", signal.SIGINT, "fork"),
    ],
)
def test_the_last_checkpoint_may_need_the_loaders_workers(
    tmp_path: Path, launcher: str, number: signal.Signals, method: str
) -> None:
    """It is that of the coming boundary, behind the window."""
    with training(launcher, tmp_path, "20", method) as (job, pids):
        if launcher == "python":
            os.killpg(job.pid, number)
        else:
            job.send_signal(number)
        code = job.wait(PATIENCE_S)
        require_gone(pids)
    said = (tmp_path / "said").read_text()
    assert durable_step(str(tmp_path / "r")) >= 40, said
    assert code == (1 if launcher == "torchrun" else 128 + number), said


@pytest.mark.parametrize("launcher", ["python", pytest.param("run", marks=pytest.mark.slow)])
def test_workers_that_were_told_too_end_no_iteration(tmp_path: Path, launcher: str) -> None:
    """`pkill -f job.py`: the iteration that is under way ends with its checkpoint."""
    with training(launcher, tmp_path, "1", "fork") as (job, pids):
        for pid in sorted({job.pid, *pids}):
            os.kill(pid, signal.SIGTERM)
        code = job.wait(PATIENCE_S)
        require_gone(pids)
    said = (tmp_path / "said").read_text()
    assert durable_step(str(tmp_path / "r")) >= 6, said
    assert code == 128 + signal.SIGTERM, said


def test_workers_whose_trainer_was_killed_end(tmp_path: Path) -> None:
    """A SIGKILL of the trainer's group reaches them no more: they look for it."""
    with training("python", tmp_path, "20", "fork") as (job, pids):
        assert [os.getpgid(pid) == job.pid for pid in pids] == [True, False, False, True]
        os.killpg(job.pid, signal.SIGKILL)
        require_gone(pids)


@pytest.mark.parametrize(
    ("launcher", "number", "to"),
    [
        ("python", signal.SIGTERM, "all"),
        pytest.param("python", signal.SIGTERM, "parent", marks=pytest.mark.slow),
        pytest.param("run", signal.SIGTERM, "parent", marks=pytest.mark.slow),
        ("run", signal.SIGINT, "parent"),
    ],
)
def test_the_end_of_their_parent_hurries_no_spawned_ranks(
    tmp_path: Path, launcher: str, number: signal.Signals, to: str
) -> None:
    """torch has the kernel send them SIGINT then, which is no second demand to end at once."""
    with training(launcher, tmp_path, script=SPAWNED) as (job, pids):
        if to == "all":
            os.killpg(job.pid, number)
        else:
            job.send_signal(number)
        job.wait(PATIENCE_S)
        require_gone(pids)
    said = (tmp_path / "said").read_text()
    assert durable_step(str(tmp_path / "r")) >= 25, said
    assert "ends at once" not in said.replace("a second signal ends it at once", "")


def test_a_launcher_that_ends_at_once_leaves_no_worker(tmp_path: Path) -> None:
    """The second signal kills the rank, and its workers do not look for it yet."""
    with training("run", tmp_path, "1000", "fork") as (job, pids):
        job.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        job.send_signal(signal.SIGINT)
        assert job.wait(PATIENCE_S) == 128 + signal.SIGTERM
        require_gone(pids, 3.0)
