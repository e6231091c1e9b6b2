"""SIGKILL before the N-th system call of one kind, by strace: no layer of ours in between.

What dies is a fresh process of the storage side (`python -m tests.campaigns.straced`), in the call
itself, in whichever of its threads makes it.
"""

import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from autockpt.values.generation import Generation
from tests.campaigns.framework import CASE_S, ROOT, Skipped, environment, require
from tests.campaigns.job import ACTS, DURABLE, SHAPES, Job, Scene, life, require_recovery

CALLS = (
    "pwrite64", "write", "pread64", "ftruncate", "fallocate", "fsync", "fdatasync", "link",
    "linkat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "rmdir",
)  # fmt: skip
"""Not those that an interpreter makes by the hundred before it begins."""
PLAYED = {"save": ACTS["save"], "restore": ACTS["restore"], "life": life}
_LINE = re.compile(r"^(\d+)\s+(\w+)\(")


class StracedKills:
    """Every (shape, act, call, number) that a process which nobody kills makes in one thread."""

    claim = "whatever was durable survives SIGKILL in any system call of the storage"

    def __init__(self, scratch: Path) -> None:
        if shutil.which("strace") is None:
            raise Skipped("needs strace")
        self._scratch = scratch
        self._plan = []
        for shape in SHAPES[:2]:
            scene = Scene(scratch, shape)
            for act in PLAYED:
                most = self._counts(scene, act)
                numbered = ((call, n) for call in sorted(most) for n in range(1, most[call] + 1))
                self._plan += [(scene, act, call, n) for call, n in numbered]
        self.distinct: int | None = len(self._plan)
        random.Random(0).shuffle(self._plan)

    def _counts(self, scene: Scene, act: str) -> Counter[str]:
        """Of every call, the most that one thread makes."""
        log = self._scratch / "calls"
        job = scene.fresh()
        status, _ = self._play(job, act, ["-o", str(log), "-e", "trace=" + ",".join(CALLS)])
        if status:
            raise Skipped(f"strace ends with {status}: it may not trace here")
        found = Counter(
            match.groups() for line in log.read_text().splitlines() if (match := _LINE.match(line))
        )
        most: Counter[str] = Counter()
        for (_, call), count in found.items():
            most[call] = max(most[call], count)
        return most

    def run(self, number: int, rng: random.Random) -> str:
        """One of the plan."""
        scene, act, call, n = self._plan[number % len(self._plan)]
        job = scene.fresh()
        inject = [
            "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={n}",
        ]  # fmt: skip
        status, promised = self._play(job, act, inject)
        require(status in (0, -signal.SIGKILL), f"{act}, {call} {n}: ended with {status}")
        require_recovery(job, promised)
        scene.require_foreign_untouched()
        return f"{act}: {'killed' if status else 'not reached'}"

    def _play(self, job: Job, act: str, options: list[str]) -> tuple[int, Generation]:
        """(exit status, the newest generation that was promised)."""
        cell = self._scratch / "promised"
        cell.write_bytes(_bytes_of(DURABLE))
        command = [
            "strace", "-f", "-qq", *options, sys.executable, "-m", "tests.campaigns.straced",
            job.path, str(SHAPES.index(job.shape)), act, str(cell),
        ]  # fmt: skip
        ended = subprocess.run(
            command, cwd=ROOT, env={**environment(), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True, text=True, timeout=CASE_S, check=False,
        )  # fmt: skip
        status = -signal.SIGKILL if ended.returncode == 128 + signal.SIGKILL else ended.returncode
        require(status <= 0, f"{act}: {ended.stderr[-1500:]}")
        said = cell.read_bytes()
        term, step = (int.from_bytes(said[at : at + 8], "big") for at in (0, 8))
        return status, Generation(term=term, step=step)

    def close(self) -> None:
        """Nothing stays open."""


def _bytes_of(generation: Generation) -> bytes:
    return generation.term.to_bytes(8, "big") + generation.step.to_bytes(8, "big")


def main(path: str, shape: str, act: str, cell: str) -> None:
    """The process that dies; what it promises stands in a file that it has mapped."""
    fd = os.open(cell, os.O_RDWR)
    told = mmap.mmap(fd, 16)
    job = Job(path=path, shape=SHAPES[int(shape)], term=1)

    def promise(generation: Generation) -> None:
        told[:16] = _bytes_of(generation)

    job.promise = promise
    job.run_id = job.directory.open()
    PLAYED[act](job)


if __name__ == "__main__":
    main(*sys.argv[1:])
