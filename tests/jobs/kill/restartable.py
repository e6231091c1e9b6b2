"""A restartable job under `autockpt run` whose ranks are killed as planned.

Each iteration writes down a digest of all that it begins with.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.jobs.kill.ordeal import read_events
from tests.jobs.kill.zygote import environment

PATIENCE_S = 120.0
SCRIPT = """
import json, os, signal, sys, threading, time
import torch
import torch.distributed as dist
import xxhash
import autockpt

torch.manual_seed(3)
folder, steps, leaves = sys.argv[1], int(sys.argv[2]), sys.argv[3]
started, started_s = [0], [0.0]
deaths = json.load(open(f"{folder}/deaths")) if os.path.exists(f"{folder}/deaths") else []

def may_die(place, step=-1):
    # Deaths happen in their order, each in one rank, once.
    turn = sum(os.path.exists(f"{folder}/death-{n}") for n in range(len(deaths)))
    death = deaths[turn] if turn < len(deaths) else {}
    if [death.get(k) for k in ("rank", "place")] != [int(os.environ["RANK"]), place]:
        return
    if step < death["step"]:
        return
    if turn and os.path.getmtime(f"{folder}/death-{turn - 1}") > started_s[0]:
        return  # two deaths in one start would be one restart
    def die():
        time.sleep(death["after_s"])
        open(f"{folder}/death-{turn}", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if death["after_s"]:
        threading.Thread(target=die).start()
    else:
        die()

class Body(torch.nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = layer(x)
            if isinstance(layer, torch.nn.Dropout) and self.training:
                may_die("forward", self.step)
                x.register_hook(lambda gradient: may_die("backward", self.step))
        return x

@autockpt.restartable
def main(offset):
    started[0], started_s[0] = started[0] + 1, time.time()
    start, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    open(f"{folder}/begun-{start}-{rank}", "w").close()
    may_die("call")
    may_die("connect")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    inner = Body(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 700),
        torch.nn.ReLU(), torch.nn.Linear(700, 700), torch.nn.Dropout(0.2),
        torch.nn.Linear(700, 1),
    )
    inner.step = -1
    model = torch.nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    torch.manual_seed(100 + rank + offset)
    rows = torch.utils.data.TensorDataset(
        torch.arange(120), torch.randn(120, 16, generator=torch.Generator().manual_seed(1))
    )
    sampler = torch.utils.data.DistributedSampler(rows, shuffle=True, seed=3)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, sampler=sampler)
    may_die("attach")
    ckpt = autockpt.attach(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    if leaves == "thread":
        threading.Thread(target=time.sleep, args=(3600,), name="loads-data", daemon=True).start()

    def digest():
        found = xxhash.xxh3_64(torch.get_rng_state().numpy().tobytes())
        moments = [m for s in optimizer.state.values() for m in s.values()]
        for tensor in [*inner.state_dict().values(), *moments]:
            found.update(tensor.numpy().tobytes())
        found.update(repr(scheduler.get_last_lr()).encode())
        return found.hexdigest()[:16]

    with open(f"{folder}/rank-{rank}", "a", buffering=1) as log:
        for step, (ids, x) in ckpt.batches(steps):
            log.write(f"{step} {os.getpid()} {digest()} {ids.tolist()}\\n")
            inner.step = step
            if step % 4 == 0:
                may_die("save", step)  # a copy has just begun
            loss = model(x).square().mean()
            time.sleep(0.01)
            loss.backward()
            may_die("optimizer", step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        may_die("end")
        log.write(f"end {os.getpid()} {digest()} []\\n")
    print(f"rank {rank} is done in call {started[0]}", flush=True)
    return digest()

assert len(main(0)) == 16
"""


PLACES = ("forward", "backward", "optimizer", "save", "call", "connect", "attach")
"""Where a rank dies in the script."""
CONNECTS_S = 0.05
"""Within so long ranks connect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """SIGKILL of one rank, from within."""

    rank: int
    place: str
    """Of PLACES, or "end"."""
    step: int = -1
    """At the first iteration from this one on."""
    after_s: float = 0.0
    """So long after it has come there."""


class Job:
    """The script under `autockpt run`, and what its ranks have written."""

    def __init__(
        self, folder: Path, steps: int, *, ranks: int, leaves: str, standby: str,
        deaths: Sequence[Death], nodes: int,
    ) -> None:  # fmt: skip
        folder.mkdir()
        (folder / "deaths").write_text(json.dumps([asdict(death) for death in deaths]))
        self.folder, self.run, self.ranks = folder, folder / "run", ranks
        (folder / "train.py").write_text(SCRIPT)
        settings = ["memory.interval=4steps", "disk.interval=1000steps", "retune=false",
                    f"restart.standby={standby}"]  # fmt: skip
        sets = [word for setting in settings for word in ("--set", setting)]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        meeting = ["--nnodes", str(nodes), "--rdzv-id", "job", "--rdzv-endpoint",
                   f"127.0.0.1:{port}"] if nodes > 1 else []  # fmt: skip
        command = [
            sys.executable, "-m", "autockpt", "run", "--nproc-per-node", str(ranks // nodes),
            *meeting, "--no-profile", "--max-restarts", "100", "--run-dir", str(self.run), *sets,
            "--", str(folder / "train.py"), str(folder), str(steps), leaves,
        ]  # fmt: skip
        self._command = command
        self.processes = [self._launch()]
        self.process = self.processes[0]
        if nodes > 1:  # the first one keeps the store of the rendezvous, and is not replaced
            self.wait(lambda: _listens(port), "store of the rendezvous")
        self.processes += [self._launch() for _ in range(nodes - 1)]

    def _launch(self) -> "subprocess.Popen[bytes]":
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                self._command, env=environment(), cwd=self.folder, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def replace_launcher(self, node: int) -> None:
        """It is killed, its ranks end with it, and another one comes."""
        self.processes[node].kill()
        self.processes[node].wait()
        self.processes[node] = self._launch()

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

    def finish(self, within_s: float = PATIENCE_S) -> None:
        """To the end of the training."""
        for process in self.processes:
            assert process.wait(within_s) == 0, self.said()[-6000:]


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextlib.contextmanager
def job(
    folder: Path, steps: int, *, ranks: int = 2, leaves: str = "nothing", standby: str = "off",
    deaths: Sequence[Death] = (), nodes: int = 1,
) -> Iterator[Job]:  # fmt: skip
    """Ends with the test."""
    made = Job(folder, steps, ranks=ranks, leaves=leaves, standby=standby, deaths=deaths,
               nodes=nodes)  # fmt: skip
    try:
        yield made
    finally:
        for process in made.processes:
            if process.poll() is None:
                process.terminate()
        for process in made.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def require_exact(disturbed: Job, undisturbed: Job) -> None:
    """Every iteration began with the same, also one that was trained again; so did the end."""
    for rank in range(disturbed.ranks):
        expected = {row[0]: row[2:] for row in undisturbed.rows(rank)}
        found = disturbed.rows(rank)
        assert found[-1][0] == "end"
        for row in found:
            assert row[2:] == expected[row[0]], (rank, row)


def deaths(rng: random.Random, ranks: int, count: int) -> list[Death]:
    """In every place about equally often, and no rank dies much more rarely than others.

    The last one is behind the training.
    """
    found: list[Death] = []
    order: list[int] = []
    places: list[str] = []
    step = 0
    while len(found) < count:
        order = order or rng.sample(range(ranks), ranks)
        places = places or rng.sample(PLACES, len(PLACES))
        step += rng.randrange(4, 12)
        last = len(found) == count - 1
        place = "end" if last else places.pop()
        at_start = place in ("call", "connect", "attach", "end")
        after_s = 0.0 if place == "call" else rng.choice([0.0, rng.uniform(0.0, 0.02)])
        after_s = rng.uniform(0.0, CONNECTS_S) if place == "connect" else after_s
        found.append(
            Death(rank=order.pop(), place=place, step=-1 if at_start else step, after_s=after_s)
        )
    return found
