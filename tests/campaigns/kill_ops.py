"""SIGKILL at every operation of save, commit, restore, scrub and retention, and again in recovery.

The process that dies is a child that was forked for it; what it had reported durable stands in
memory that it shared with its parent.
"""

import mmap
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.campaigns.errno_ops import operations
from tests.campaigns.faults import Layer, Sudden
from tests.campaigns.framework import require
from tests.campaigns.job import ACTS, SHAPES, Job, Scene, no_leak, require_recovery


class KillEverywhere:
    """Every (shape, act, operation, before it or with it half done)."""

    claim = "whatever was durable survives SIGKILL at any operation, and saving goes on"

    def __init__(self, scratch: Path) -> None:
        self._plan = [
            (scene, act, operation, half)
            for scene in (Scene(scratch, shape) for shape in SHAPES)
            for act in ACTS
            for operation in range(operations(scene, act))
            for half in (False, True)
        ]
        self.distinct: int | None = len(self._plan)
        random.Random(0).shuffle(self._plan)

    def run(self, number: int, rng: random.Random) -> str:
        """One of the plan."""
        scene, act, operation, half = self._plan[number % len(self._plan)]
        job = scene.fresh()
        promised = die(job, [(act, Sudden(operation, half))])
        with no_leak():
            require_recovery(job, promised)
        scene.require_foreign_untouched()
        return act

    def close(self) -> None:
        """Nothing stays open."""


class KillInRecovery:
    """A kill in an act, another one in the start or the save after it, then the oracle."""

    claim = "whatever was durable survives a second SIGKILL in the recovery from the first"

    def __init__(self, scratch: Path) -> None:
        self._scenes = [Scene(scratch, shape) for shape in SHAPES[:2]]
        self._lengths = {
            (scene.shape, act): operations(scene, act) for scene in self._scenes for act in ACTS
        }
        firsts = sum(self._lengths[key] for key in self._lengths)
        seconds = sum(self._lengths[scene.shape, "start"] for scene in self._scenes)
        self.distinct: int | None = firsts * seconds // len(self._scenes)

    def run(self, number: int, rng: random.Random) -> str:
        """Both instants are drawn."""
        scene = rng.choice(self._scenes)
        act, again = rng.choice(sorted(ACTS)), rng.choice(["start", "start", "save", "retain"])
        job = scene.fresh()
        first = Sudden(rng.randrange(self._lengths[scene.shape, act]), rng.random() < 0.5)
        second = Sudden(rng.randrange(self._lengths[scene.shape, again]), rng.random() < 0.5)
        promised = die(job, [(act, first)])
        promised = max(promised, die(job, [(again, second)]))
        require_recovery(job, promised)
        scene.require_foreign_untouched()
        return f"{act}, {again}"

    def close(self) -> None:
        """Nothing stays open."""


def die(job: Job, acts: list[tuple[str, Sudden]]) -> int:
    """Plays acts in a child, which is killed in one of them; the newest seq it promised."""

    def play() -> None:
        for act, rule in acts:
            with Layer(rule).armed():
                ACTS[act](job)

    return in_child(job, play)


def in_child(job: Job, play: Callable[[], None]) -> int:
    """Runs `play` in a forked process; the newest generation it reported durable, 3 if none.

    Raises Violation when it ends in another way than by itself, by an error of ours, by SIGKILL.
    """
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    shared[0] = 3
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _be_the_child(job, play, shared)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    promised, told = shared[0], shared[1:].split(b"\0", 1)[0].decode(errors="replace")
    shared.close()
    require(code in (0, -signal.SIGKILL), f"the child ended with {code}: {told}")
    return promised


def _be_the_child(job: Job, play: Callable[[], None], shared: mmap.mmap) -> None:
    def promise(seq: int) -> None:
        shared[0] = max(shared[0], seq)

    code = 1
    try:
        job.promise = promise
        play()
        code = 0
    except BaseException:
        told = traceback.format_exc()[-4000:].encode()
        shared[1 : 1 + len(told)] = told
    finally:
        os._exit(code)
