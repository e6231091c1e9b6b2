"""A job of several launchers with a rank each on one machine, to be watched and ended."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import end_keeper, keeper_pids

ROOT = Path(__file__).resolve().parents[3]
STEPS = 120
TRAINING = ("examples/gpt/train.py", "--size", "tiny", "--steps", str(STEPS), "--digest",
            "--threads", "1", "--text-bytes", "200000")  # fmt: skip
PATIENCE_S = 120.0


def environment() -> dict[str, str]:
    """One thread everywhere, this checkout, nothing of an outer launcher."""
    foreign = ("RANK", "WORLD_SIZE", "SLURM_", "TORCHELASTIC", "AUTOCKPT_", "LOCAL_", "MASTER_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def undisturbed_digest(ranks: int) -> str:
    """The end of the training by so many ranks on one node, without autockpt."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
               "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *TRAINING,
               "--no-checkpoint"]  # fmt: skip
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    found = re.search(r"^digest: (\w+)$", ended.stdout, re.M)
    assert found, ended.stderr[-3000:]
    return found[1]


class NodesJob:
    """One launcher a node, with `ranks` each; `settings` go to every launcher.

    `least` nodes may go on alone.
    """

    def __init__(
        self,
        folder: Path,
        count: int = 2,
        settings: Sequence[str] = (),
        *,
        least: int = 0,
        ranks: int = 1,
        script: str = TRAINING[0],
    ) -> None:
        self.run_dir = str(folder / "run")
        self._ranks = ranks
        self.count, self._settings, self._script = count, settings, script
        self._nodes = f"{least}:{count}" if least else str(count)
        self._logs = [folder / f"launcher-{node}.log" for node in range(count)]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self.launchers = [self._launch(node) for node in range(count)]

    def _launch(self, node: int) -> "subprocess.Popen[bytes]":
        wanted = [word for setting in self._settings for word in ("--set", setting)]
        command = [
            sys.executable, "-m", "autockpt", "run", "--no-profile", "--nnodes", self._nodes,
            "--nproc-per-node", str(self._ranks), "--node-rank", str(node), "--rdzv-id", "nodes",
            "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--run-dir", self.run_dir,
            "--rdzv-conf", f"is_host={node == 0}",  # else any of them, and it could not be lost
            "--set", "memory.interval=3 steps", "--set", "disk.interval=15 steps", *wanted,
            self._script, *TRAINING[1:],
        ]  # fmt: skip
        with self._logs[node].open("ab") as log:
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
        return max((e["step"] for e in self.events(f"keeper-{node:03d}", "CheckpointDurable")),
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
        left = [pid for node in range(self.count) for pid in keeper_pids(self.run_dir, node)]
        assert not left, self.tale()
        found = re.findall(r"^digest: (\w+)$", "".join(x.read_text() for x in self._logs), re.M)
        assert len(found) == 1, self.tale()
        return str(found[0])

    def tale(self) -> str:
        """Everything a failure needs."""
        files = [*self._logs, *sorted(Path(self.run_dir, "logs").glob("keeper-*.log"))]
        return "".join(f"\n--- {x.name}\n{x.read_text()[-3000:]}" for x in files if x.exists())

    def end(self) -> None:
        """Ends what is left of it."""
        ranks = range(self.count * self._ranks)
        trainers = [e["pid"] for r in ranks for e in self.events(f"rank-{r:05d}", "RunStarted")]
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()
                for pid in trainers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        end_keeper(self.run_dir, nodes=self.count)

    def lose_node(self, node: int) -> None:
        """The machine is gone: launcher, trainer and keeper, and their memory with them."""
        pids = [event["pid"] for event in self.events(f"rank-{node:05d}", "RunStarted")][-1:]
        self.launchers[node].kill()
        for pid in [*pids, *keeper_pids(self.run_dir, node)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launchers[node].wait()

    def replace_node(self, node: int) -> None:
        """A new machine takes its place."""
        self.launchers[node] = self._launch(node)
