"""One training as a job of Slurm: submitted, watched, disturbed, compared with an undisturbed."""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.slurm.cluster import Cluster, free_ports, wait

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "tests" / "slurm" / "training.py"
STEPS = 120
ARGS = ("--size", "tiny", "--steps", str(STEPS), "--digest", "--threads", "1",
        "--text-bytes", "200000", "--log-every", "5")  # fmt: skip
POLICY = ("--no-profile", "--set", "memory.interval=5 steps", "--set", "disk.interval=20 steps")
TWO = ("--nodes=2", "--ntasks-per-node=1")
ENDS = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
SEED = int(os.environ.get("SEED", "0"))
"""Of the moments at which jobs are disturbed."""


def command(job: "Job", *options: str, seed: int = 0, is_placed: bool = True) -> str:
    """`autockpt run` of the training, for a shell; not placed: it finds its run directory."""
    where = ("--run-dir", str(job.run_dir)) if is_placed else ()
    words = (
        "autockpt",
        "run",
        *POLICY,
        *where,
        *options,
        str(TRAINING),
        *ARGS,
        "--seed",
        str(seed),
    )
    return shlex.join(words)


class Job:
    """Its folder has the job's output, the run directory, and the file that ends the slowness."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.run_dir, self.hold, self.output = folder / "run", folder / "go", folder / "job.out"
        self.number, self.slow_s, self._starts = "", 0.1, 0
        self._chance = random.Random(f"{SEED} {folder.name}")

    def submit(self, script: Path, *options: str) -> None:
        """By sbatch, with the checkout and its environment."""
        environment = {
            **self.cluster.environment, "HOLD": str(self.hold), "SLOW_S": str(self.slow_s),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        }  # fmt: skip
        done = subprocess.run(
            ["sbatch", "--parsable", "--output", str(self.output), "--open-mode=append", *options,
             str(script)],
            check=False, cwd=self.folder, env=environment, text=True, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()

    def submit_lines(self, *lines: str, options: Sequence[str] = ()) -> None:
        """A job script of these lines."""
        script = self.folder / "job.sbatch"
        script.write_text("\n".join(("#!/bin/bash", *lines, "")))
        self.submit(script, *options)

    def facts(self, number: str = "") -> dict[str, str]:
        """What `scontrol show job` says."""
        text = self.cluster.run("scontrol", "-o", "show", "job", number or self.number)
        return dict(re.findall(r"(\w+)=(\S*)", text.splitlines()[0]))

    def said(self) -> str:
        """The output so far."""
        with contextlib.suppress(FileNotFoundError):
            return self.output.read_text(errors="replace")
        return ""

    def events(self, name: str) -> list[dict[str, Any]]:
        """Of one kind, from all ranks and keepers; a line that a kill tore is left out."""
        found = []
        for file in sorted(self.run_dir.glob("telemetry/*.jsonl")):
            for line in file.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if event["event"] == name:
                        found.append(event)
        return found

    def step(self) -> int:
        """The newest iteration that a rank has told of."""
        said = re.findall(r"^step (\d+) ", self.said(), re.M)
        return max((int(step) for step in said), default=0)

    def durable(self) -> int:
        """The newest durable step."""
        return max((event["step"] for event in self.events("CheckpointDurable")), default=0)

    def trainers(self) -> list[int]:
        """Processes of the newest start, by rank."""
        newest = {event["rank"]: event["pid"] for event in self.events("RunStarted")}
        return [newest[rank] for rank in sorted(newest)]

    def trains_on(self, node: str) -> bool:
        """Whether a rank of the newest start is on this node."""
        told = os.fsencode(f"SLURMD_NODENAME={node}")
        return any(
            told in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            for pid in self.trainers()
        )

    def kill_rank(self, rank: int) -> None:
        """Its process is gone without a word."""
        os.kill(self.trainers()[rank], signal.SIGKILL)

    def resumed(self) -> list[int]:
        """The steps that starts have resumed, one a start."""
        return [int(step) for step in re.findall(r"resumed step (\d+)", self.said())]

    def wait(self, done: Callable[[], object], what: str) -> None:
        """While it goes on: what it printed and its events become more."""
        wait(done, what, self.tale, self._progress, self._is_over)

    def _is_over(self) -> bool:
        return not self.number or self.facts()["JobState"] in ENDS

    def _progress(self) -> tuple[str, int]:
        """Its last line, and the bytes of its events."""
        files = self.run_dir.glob("telemetry/*.jsonl")
        return self.said()[-200:], sum(file.stat().st_size for file in files)

    def wait_step(self) -> int:
        """Until it has trained some time, which SEED chooses, and something is durable.

        The newest step that has been told of.
        """
        least = self._chance.randrange(20, 60)
        self.wait(lambda: self.step() >= least and self.durable() >= 20, f"step {least}")
        return self.step()

    def start_again(self) -> None:
        """Waits until it is queued again; Slurm would have it wait two minutes more."""
        self.wait(lambda: int(self.facts()["Restarts"]) > self._starts, "it is queued again")
        self._starts += 1
        self.cluster.start_now(self.number)

    def wait_over(self, *states: str) -> dict[str, str]:
        """Until Slurm says that it has one of these states; its facts."""
        self.wait(lambda: self.facts()["JobState"] in states, f"the job is {' or '.join(states)}")
        return self.facts()

    def finish(self) -> str:
        """Lets it train to its end.  The digest that rank 0 printed."""
        self.hold.touch()
        facts = self.wait_over(*ENDS)
        assert facts["JobState"] == "COMPLETED", self.tale()
        return self.digest()

    def digest(self) -> str:
        """The one digest in its output."""
        found = re.findall(r"^digest: (\w+)$", self.said(), re.M)
        assert len(found) == 1, self.tale()
        return str(found[0])

    def tale(self) -> str:
        """Everything a failure needs."""
        keepers = sorted(self.run_dir.glob("logs/keeper-*.log"))
        logs = "".join(f"\n--- {x.name}\n{x.read_text()[-1500:]}" for x in keepers)
        facts = self.facts() if self.number else {}
        kept = ("JobState", "Reason", "Restarts", "ExitCode", "NodeList")
        told = {name: facts.get(name) for name in kept}
        return f"\n{told}\n--- output\n{self.said()[-6000:]}{logs}"

    def end(self) -> None:
        """Cancels what is left of it."""
        if self.number:
            self.cluster.run("scancel", "--signal=KILL", "--full", self.number, check=False)
            self.cluster.run("scancel", self.number, check=False)
            with contextlib.suppress(AssertionError):
                self.wait_over(*ENDS)


@cache
def undisturbed(ranks: int, seed: int = 0) -> str:
    """The digest of the bare script, without autockpt and Slurm."""
    (port,) = free_ports(1)
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }  # fmt: skip
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port",
                str(port)) if ranks > 1 else ()  # fmt: skip
    done = subprocess.run(
        [sys.executable, *launcher, str(TRAINING), *ARGS, "--seed", str(seed), "--no-checkpoint"],
        check=False, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=3600.0,
    )  # fmt: skip
    found = re.findall(r"^digest: (\w+)$", done.stdout, re.M)
    assert len(found) == 1, done.stdout + done.stderr
    return str(found[0])
