"""The example job under the real launcher: `autockpt run` on two ranks, killed, started again."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from autockpt.executors.keeper.launch import keeper_status
from tests.conftest import end_keeper, keeper_pids
from tests.jobs.kill.ordeal import read_events
from tests.jobs.kill.zygote import ROOT, environment

STEPS = 150
PATIENCE_S = 100.0
SCRIPT = [str(ROOT / "examples/gpt/train.py"), "--size", "tiny", "--steps", str(STEPS)]


def bare_digest(folder: Path) -> str:
    """Of a run that nobody disturbs and that knows nothing of autockpt."""
    bare = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
         *SCRIPT, "--no-checkpoint", "--digest"],
        env=environment(), cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S,
        check=True,
    )  # fmt: skip
    return digest_in(bare.stdout)


class Launch:
    """One `autockpt run` and what it reports."""

    SETTINGS: tuple[str, ...] = ("memory.interval=4steps", "disk.interval=12steps", "retune=false")

    def __init__(self, folder: Path) -> None:
        self.memory_lost_s = 0.0
        self.folder = folder
        self.run_dir, self.log, self.steps = folder / "run", folder / "out", folder / "steps"
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        options = ["--nproc-per-node", "2", "--run-dir", str(self.run_dir), "--no-profile"]
        for setting in self.SETTINGS:
            options += ["--set", setting]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "autockpt", "run", *options, "--", *SCRIPT, "--digest",
                 "--log", str(self.steps)],
                stdout=log, stderr=subprocess.STDOUT, env=environment(),
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Telemetry of a rank ("rank-00000") or of the keeper ("keeper-000")."""
        path = self.run_dir / "telemetry" / f"{name}.jsonl"
        return [event for event in read_events(path) if event["event"] == kind]

    def newest(self, kind: str, since_s: float = 0.0) -> int:
        """Newest step that the keeper reported as CheckpointDurable or MemoryCommitted."""
        events = self.events("keeper-000", kind)
        return max((event["step"] for event in events if event["at_s"] > since_s), default=0)

    def trainer(self, rank: int) -> int:
        """Process of a rank."""
        return int(self.events(f"rank-{rank:05d}", "RunStarted")[-1]["pid"])

    def step(self) -> int:
        """Newest step that rank 0 logged."""
        with contextlib.suppress(FileNotFoundError):
            lines = self.steps.read_text().splitlines()
            return int(lines[-1].split()[0]) if lines else 0
        return 0

    def wait(self, done: Any, what: str) -> None:
        """Polls with a deadline; fails at once when the launcher has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert self.process.poll() is None, f"ended before {what}: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"no {what}: {self.log.read_text()[-4000:]}"
            time.sleep(0.01)

    def kill(self, victim: str, rank: int) -> None:
        """SIGKILL, then what had been promised is compared with what is restored."""
        began = {r: len(self.events(f"rank-{r:05d}", "RunStarted")) for r in (0, 1)}
        keepers = keeper_pids(str(self.run_dir))
        status = keeper_status(str(self.run_dir), 0) if victim == "trainer" else None
        # A keeper that has just been started may not have been given everybody's memory yet.
        held = status is not None and set(status.trainers) == {0, 1}
        victims = {"trainer": [self.trainer(rank)], "keeper": keepers}.get(
            victim, [*keepers, self.trainer(rank)]
        )
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        when = time.monotonic()
        promised = self.newest("CheckpointDurable")
        if held:
            promised = max(promised, self.newest("MemoryCommitted", self.memory_lost_s))
        elif victim != "keeper":
            self.memory_lost_s = when
        if victim == "keeper":
            self.wait(lambda: set(keeper_pids(str(self.run_dir))) - set(keepers), "new keeper")
            return
        for r in (0, 1):
            self.wait(
                lambda r=r: len(self.events(f"rank-{r:05d}", "RunStarted")) > began[r],  # type: ignore[misc]
                f"restart of rank {r} after the {victim} was killed",
            )
        self.wait(lambda: len(self.restored(when)) >= 2, "report of the restore")
        for event in self.restored(when):
            assert event["step"] >= promised, (victim, promised, event)

    def kill_launcher(self) -> None:
        """SIGKILL of `autockpt run`; a person ends its ranks, which would train on, and starts the
        same command again."""
        began = {r: len(self.events(f"rank-{r:05d}", "RunStarted")) for r in (0, 1)}
        self.process.kill()
        self.process.wait()
        for rank in (0, 1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.trainer(rank), signal.SIGKILL)
        when, promised = time.monotonic(), self.newest("CheckpointDurable")
        self.process = self._start()
        for r in (0, 1):
            self.wait(
                lambda r=r: len(self.events(f"rank-{r:05d}", "RunStarted")) > began[r],  # type: ignore[misc]
                f"start of rank {r} under the next launcher",
            )
        self.wait(lambda: len(self.restored(when)) >= 2, "report of the restore")
        for event in self.restored(when):
            assert event["step"] >= promised, ("launcher", promised, event)

    def finish(self) -> str:
        """Waits for the end of the training; its digest."""
        status = self.process.wait(PATIENCE_S)
        assert status == 0, f"exit status {status}: {self.log.read_text()[-4000:]}"
        return digest_in(self.log.read_text())

    def restored(self, since_s: float) -> list[dict[str, Any]]:
        """Restores since then."""
        return [e for e in self.events("keeper-000", "Restored") if e["at_s"] > since_s]

    def end(self) -> None:
        """Nothing of it survives."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            for rank in (0, 1):
                with contextlib.suppress(IndexError, ProcessLookupError):
                    os.kill(self.trainer(rank), signal.SIGKILL)
        end_keeper(str(self.run_dir))


def digest_in(text: str) -> str:
    """The line that `--digest` prints."""
    found = re.search(r"^digest: ([0-9a-f]+)$", text, re.MULTILINE)
    assert found, text
    return found.group(1)
