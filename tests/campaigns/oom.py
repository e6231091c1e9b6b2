"""A container without memory: the kernel kills the trainer or the keeper, with what it is writing.

Trainer and keeper live in a memory cgroup of their own.  A third process in it takes memory until
the kernel must kill somebody, and the victim is the one that is most worth killing.  What recovers
does so in the same group, where the memory that the keeper holds is still charged.
"""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.framework import Skipped, require
from tests.campaigns.processes import undisturbed_end
from tests.jobs.kill.ordeal import PLANS, SPECS, Kill, Ordeal, draw
from tests.jobs.kill.zygote import Zygote
from tests.support import trainings

ROOT = Path("/sys/fs/cgroup")
LIMIT_BYTES = 3 * 2**28
"""Room for the reserve that slots leave free; less is refused, not killed."""
KILLS = 2
"""In a case: each fills the group once."""
PATIENCE_S = 30.0
HOG = """
import sys, time
held = []
while True:
    held.append(bytearray(b"x") * 2**22)
    time.sleep(0.0005)
"""


class Group:
    """A memory cgroup, of version 1 or 2, that nobody else is in."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        """Raises Skipped where none can be made."""
        self._path, limit = _place()
        self.folder = self._path
        try:
            self._path.mkdir()
            (self._path / limit).write_text(str(limit_bytes))
            with contextlib.suppress(OSError):  # absent without swap accounting
                swap = "memory.swap.max" if limit == "memory.max" else "memory.memsw.limit_in_bytes"
                (self._path / swap).write_text("0" if limit == "memory.max" else str(limit_bytes))
            self.killed()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._path.rmdir()
            raise Skipped(f"needs a memory cgroup of its own ({self._path}: {error})") from None

    def add(self, pid: int) -> None:
        """A process; its children follow, and the memory that it touches from now on."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def leave(self, pid: int) -> None:
        """Back to where this process is."""
        (self._path.parent / "cgroup.procs").write_text(str(pid))

    def killed(self) -> int:
        """Processes that the kernel has killed in it."""
        name = "memory.events" if (self._path / "memory.events").exists() else "memory.oom_control"
        words = (self._path / name).read_text().split()
        if "oom_kill" not in words:
            raise OSError("this kernel does not count OOM kills")
        return int(words[words.index("oom_kill") + 1])

    def kill(self, victim: int) -> None:
        """Takes memory until the kernel has killed `victim`."""
        before = self.killed()
        hog = subprocess.Popen([sys.executable, "-c", HOG])
        try:
            with contextlib.suppress(FileNotFoundError):  # it may have ended by itself
                Path(f"/proc/{victim}/oom_score_adj").write_text("1000")
            self.add(hog.pid)
            until_s = time.monotonic() + PATIENCE_S
            while self.killed() == before and Path(f"/proc/{victim}").exists():
                require(time.monotonic() < until_s, f"no OOM kill of {victim}")
                time.sleep(0.001)
            while _lives(victim):
                require(time.monotonic() < until_s, f"somebody else than {victim} was killed")
                time.sleep(0.001)
        finally:
            hog.kill()
            hog.wait()

    def close(self) -> None:
        """Everybody in it has ended."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._path.rmdir()
                return
            except OSError:
                require(time.monotonic() < until_s, f"{self._path}: somebody is left in it")
                time.sleep(0.01)


def _lives(pid: int) -> bool:
    """False for one that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _place() -> tuple[Path, str]:
    """(path of a group to make below our own, name of its limit)."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {kinds: path for _, kinds, path in (line.split(":", 2) for line in lines)}
    name = f"autockpt-oom-{os.getpid()}"
    for kinds, path in own.items():
        if "memory" in kinds.split(","):
            return ROOT / "memory" / path.lstrip("/") / name, "memory.limit_in_bytes"
    return ROOT / own.get("", "/").lstrip("/") / name, "memory.max"


@dataclass(kw_only=True)
class OomOrdeal(Ordeal):
    """One whose victims the kernel kills."""

    group: Group

    def start_trainer(self, **environment: str) -> int:
        """In the group from its first byte on, and so is the keeper that it starts."""
        self.group.add(self.zygote.pid)
        try:
            return super().start_trainer(**environment)
        finally:
            self.group.leave(self.zygote.pid)

    def strike(self, pid: int) -> None:
        """For want of memory."""
        self.group.kill(pid)


class OomKills:
    """Trainer, keeper or both are killed by the kernel, at random instants of a training."""

    claim = "after every OOM kill what was promised comes back; the end is an undisturbed run's"
    distinct: int | None = None

    def __init__(self, scratch: Path) -> None:
        self.executions = 0
        self._scratch, self._group = scratch, Group()
        self._zygote = Zygote()
        self._digests = [
            undisturbed_end(self._zygote, spec, scratch / f"bare-{number}")
            for number, spec in enumerate(SPECS)
        ]

    def run(self, number: int, rng: random.Random) -> str:
        """One training; the first victims go around."""
        which, left = rng.randrange(len(SPECS)), [KILLS]
        out = self._scratch / "case"
        out.mkdir()
        run_dir = trainings.prepare(out / "run", rng.choice(PLANS))
        ordeal = OomOrdeal(self._zygote, SPECS[which], run_dir, out, group=self._group)

        def next_kill() -> Kill | None:
            left[0] -= 1
            return draw(rng, SPECS[which].steps) if left[0] >= 0 else None

        before = self._group.killed()
        try:
            digest = ordeal.go(next_kill)
            require(digest == self._digests[which], f"another end; {ordeal.tale()}")
        finally:
            ordeal.end()
            self.executions += len(ordeal.done)
            shutil.rmtree(out, ignore_errors=True)
        return f"{len(ordeal.done)} kills, {self._group.killed() - before} by the kernel"

    def close(self) -> None:
        """The zygote ends with its children, the group when it is empty."""
        self._zygote.close()
        self._group.close()
