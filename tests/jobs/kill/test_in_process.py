"""A rank is killed, and the others run their function again without a new process.

Each iteration writes down a digest of all that it begins with.  The end is that of a run that
nobody disturbed.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.kill.ordeal import read_events
from tests.jobs.kill.zygote import environment

PATIENCE_S = 120.0
SEED = int(os.environ.get("KILL_SEED", "5"))
KILLS = int(os.environ.get("KILLS", "20"))
SCRIPT = """
import hashlib, os, sys, threading, time
import torch
import torch.distributed as dist
import autockpt

torch.manual_seed(3)
folder, steps, leaves = sys.argv[1], int(sys.argv[2]), sys.argv[3]
started = [0]

@autockpt.restartable
def main(offset):
    started[0] += 1
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    inner = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2),
        torch.nn.Linear(32, 1),
    )
    model = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    torch.manual_seed(100 + rank + offset)
    rows = torch.utils.data.TensorDataset(
        torch.arange(120), torch.randn(120, 16, generator=torch.Generator().manual_seed(1))
    )
    sampler = torch.utils.data.DistributedSampler(rows, shuffle=True, seed=3)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, sampler=sampler)
    ckpt = autockpt.attach(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    if leaves == "thread":
        threading.Thread(target=time.sleep, args=(3600,), name="loads-data", daemon=True).start()

    def digest():
        found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        moments = [m for s in optimizer.state.values() for m in s.values()]
        for tensor in [*inner.state_dict().values(), *moments]:
            found.update(tensor.numpy().tobytes())
        found.update(repr(scheduler.get_last_lr()).encode())
        return found.hexdigest()[:16]

    with open(f"{folder}/rank-{rank}", "a", buffering=1) as log:
        for step, (ids, x) in ckpt.batches(steps):
            log.write(f"{step} {os.getpid()} {digest()} {ids.tolist()}\\n")
            loss = model(x).square().mean()
            time.sleep(0.01)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        log.write(f"end {os.getpid()} {digest()} []\\n")
    print(f"rank {rank} is done in call {started[0]}", flush=True)
    return digest()

assert len(main(0)) == 16
"""


class Job:
    """The script under `autockpt run`, and what its ranks have written."""

    def __init__(self, folder: Path, steps: int, *, ranks: int, leaves: str, standby: str) -> None:
        folder.mkdir()
        self.folder, self.run, self.ranks = folder, folder / "run", ranks
        (folder / "train.py").write_text(SCRIPT)
        settings = ["memory.interval=4steps", "disk.interval=1000steps", "retune=false",
                    f"restart.standby={standby}"]  # fmt: skip
        sets = [word for setting in settings for word in ("--set", setting)]
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "autockpt", "run", "--nproc-per-node", str(ranks),
                 "--no-profile", "--max-restarts", "100", "--run-dir", str(self.run), *sets, "--",
                 str(folder / "train.py"), str(folder), str(steps), leaves],
                env=environment(), cwd=folder, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def rows(self, rank: int) -> list[list[str]]:
        """(step, process, digest, samples) of each iteration; a line under way is left out."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"rank-{rank}").read_text().split("\n")[:-1]
            return [line.split(" ", 3) for line in lines]
        return []

    def step(self, rank: int = 0) -> int:
        """Newest step of a rank."""
        rows = self.rows(rank)
        return int(rows[-1][0]) if rows and rows[-1][0] != "end" else -1

    def starts(self, rank: int) -> list[dict[str, Any]]:
        """Its `RunStarted` events."""
        path = self.run / "telemetry" / f"rank-{rank:05d}.jsonl"
        return [event for event in read_events(path) if event["event"] == "RunStarted"]

    def said(self) -> str:
        """All output of launcher and rank 0."""
        return (self.folder / "log").read_text(errors="replace")

    def wait(self, done: Callable[[], object], what: str) -> None:
        """Polls with a deadline."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert self.process.poll() is None, f"ended before {what}: {self.said()[-6000:]}"
            assert time.monotonic() < deadline, f"no {what}: {self.said()[-6000:]}"
            time.sleep(0.005)

    def kill(self, rank: int) -> None:
        """SIGKILL, and the training goes on."""
        before = [len(self.starts(one)) for one in range(self.ranks)]
        os.kill(self.starts(rank)[-1]["pid"], signal.SIGKILL)
        for one in range(self.ranks):
            self.wait(lambda r=one: len(self.starts(r)) > before[r], f"restart of rank {one}")  # type: ignore[misc]
        rows = len(self.rows(rank))
        self.wait(lambda: len(self.rows(rank)) > rows, f"iteration of rank {rank}")

    def finish(self) -> None:
        """To the end of the training."""
        assert self.process.wait(PATIENCE_S) == 0, self.said()[-6000:]


@contextlib.contextmanager
def job(
    folder: Path, steps: int, *, ranks: int = 2, leaves: str = "nothing", standby: str = "off"
) -> Iterator[Job]:
    """Ends with the test."""
    made = Job(folder, steps, ranks=ranks, leaves=leaves, standby=standby)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                made.process.wait(60)
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait()


def require_exact(disturbed: Job, undisturbed: Job, *, part: int = 2) -> None:
    """Every iteration began with the same, also one that was trained again; so did the end.

    `part`: 3 compares samples alone.
    """
    for rank in range(disturbed.ranks):
        expected = {row[0]: row[part:] for row in undisturbed.rows(rank)}
        found = disturbed.rows(rank)
        assert found[-1][0] == "end"
        for row in found:
            assert row[part:] == expected[row[0]], (rank, row)


@pytest.mark.timeout(280)
def test_a_survivor_goes_on_in_its_process(tmp_path: Path) -> None:
    """With the variables and the output of the new start; what it trains again is the same."""
    with job(tmp_path / "job", 60) as killed:
        killed.wait(lambda: killed.step() >= 20, "step 20")
        killed.kill(0)
        killed.finish()
    starts = [killed.starts(rank) for rank in (0, 1)]
    assert [[start["process"] for start in one] for one in starts] == [["new"] * 2, ["new", "same"]]
    assert starts[0][0]["pid"] != starts[0][1]["pid"]
    assert starts[1][0]["pid"] == starts[1][1]["pid"]
    for rank in (0, 1):
        seen: dict[str, list[str]] = {}
        for step, _, *began in killed.rows(rank):
            assert seen.setdefault(step, began) == began, (rank, step)
        assert list(seen) == [*map(str, range(60)), "end"]
    assert "rank 1 in its own process" in killed.said()
    logs = sorted(killed.run.glob("logs/*-attempt-*/rank-00001.out"))
    assert [path.read_text() for path in logs] == ["", "rank 1 is done in call 2\n"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_survivors_that_wait_for_one_another_are_freed(tmp_path: Path) -> None:
    """Of four ranks.  Sums of more than two depend on their order in DDP's first iteration, so
    samples alone are compared."""
    with job(tmp_path / "a", 60, ranks=4) as whole:
        whole.finish()
    with job(tmp_path / "b", 60, ranks=4) as killed:
        killed.wait(lambda: killed.step() >= 20, "step 20")
        killed.kill(1)
        killed.finish()
    require_exact(killed, whole, part=3)
    kinds = [killed.starts(rank)[-1]["process"] for rank in range(4)]
    assert kinds == ["same", "new", "same", "same"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_is_left_by_the_function_forces_a_new_process(tmp_path: Path) -> None:
    """A thread, which is named once."""
    with job(tmp_path / "a", 60) as whole:
        whole.finish()
    with job(tmp_path / "b", 60, leaves="thread") as killed:
        for step in (10, 30):
            killed.wait(lambda s=step: killed.step() >= s, f"step {step}")  # type: ignore[misc]
            killed.kill(1)
        killed.finish()
    require_exact(killed, whole)
    assert [start["process"] for start in killed.starts(0)] == ["new"] * 3
    reason = "its function has left a thread, loads-data"
    assert [start["new_process_reason"] for start in killed.starts(0)] == ["", reason, reason]
    assert killed.said().count(f"rank 0 goes on in a new process: {reason}") == 1


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_twenty_kills_end_in_the_state_of_an_undisturbed_run(tmp_path: Path) -> None:
    """At random instants.  Replay: KILL_SEED=N pytest tests/jobs/kill/test_in_process.py"""
    rng = random.Random(SEED)
    with job(tmp_path / "a", 400) as whole:
        whole.finish()
    with job(tmp_path / "b", 400, standby="on") as killed:
        for step in sorted(rng.sample(range(5, 395), KILLS)):
            killed.wait(lambda s=step: killed.step() >= s, f"step {step}")  # type: ignore[misc]
            instant = time.monotonic() + rng.uniform(0, 0.03)
            killed.wait(lambda t=instant: time.monotonic() >= t, "instant")  # type: ignore[misc]
            killed.kill(rng.randrange(2))
        killed.finish()
    require_exact(killed, whole)
    same = sum(start["process"] == "same" for rank in (0, 1) for start in killed.starts(rank))
    assert same >= KILLS * 3 // 4
