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

from autockpt.values.generation import Generation
from tests.campaigns.errno_ops import operations
from tests.campaigns.faults import Layer, Sudden
from tests.campaigns.framework import require
from tests.campaigns.job import (
    ACTS,
    DURABLE,
    SHAPES,
    Job,
    Scene,
    life,
    no_leak,
    require_recovery,
)


class KillEverywhere:
    """Every (shape, act, operation that changes something, before it or with it half done).

    A kill before one that only reads leaves what a kill before the next one leaves.
    """

    claim = "whatever was durable survives SIGKILL at any operation, and saving goes on"

    def __init__(self, scratch: Path) -> None:
        self._plan = [
            (scene, act, operation, half)
            for scene in (Scene(scratch, shape) for shape in SHAPES)
            for act in ACTS
            for operation in changing(scene, ACTS[act])
            for half in (False, True)
        ]
        self.distinct: int | None = len(self._plan)
        random.Random(0).shuffle(self._plan)

    def run(self, number: int, rng: random.Random) -> str:
        """One of the plan."""
        scene, act, operation, half = self._plan[number % len(self._plan)]
        job = scene.fresh()
        promised = die(job, ACTS[act], Sudden(operation, half))
        with no_leak():
            require_recovery(job, promised)
        scene.require_foreign_untouched()
        return act

    def close(self) -> None:
        """Nothing stays open."""


class KillInRecovery:
    """A kill in an act, another one in the life of the process that comes after, the oracle."""

    claim = "whatever was durable survives a second SIGKILL in the recovery from the first"

    def __init__(self, scratch: Path) -> None:
        self._scenes = [Scene(scratch, shape) for shape in SHAPES[:2]]
        self._firsts = {
            (scene.shape, act): changing(scene, ACTS[act]) for scene in self._scenes for act in ACTS
        }
        self._lives = {scene.shape: changing(scene, life) for scene in self._scenes}
        self.distinct: int | None = sum(
            4 * len(some) * len(self._lives[shape]) for (shape, _), some in self._firsts.items()
        )

    def run(self, number: int, rng: random.Random) -> str:
        """Both instants are drawn."""
        scene, act = rng.choice(self._scenes), rng.choice(sorted(ACTS))
        job = scene.fresh()
        first = Sudden(rng.choice(self._firsts[scene.shape, act]), rng.random() < 0.5)
        second = Sudden(rng.choice(self._lives[scene.shape]), rng.random() < 0.5)
        promised = die(job, ACTS[act], first)
        promised = max(promised, die(job, life, second))
        require_recovery(job, promised)
        scene.require_foreign_untouched()
        return f"{act}, life"

    def close(self) -> None:
        """Nothing stays open."""


def changing(scene: Scene, act: Callable[[Job], object]) -> list[int]:
    """Numbers of the operations of an act that change something, and of the end."""
    changes = operations(scene, act)
    return [*(number for number, changed in enumerate(changes) if changed), len(changes)]


def die(job: Job, act: Callable[[Job], object], rule: Sudden) -> Generation:
    """Plays an act in a child, which is killed in it; the newest generation it promised.

    Raises Violation when it ends in another way than by SIGKILL, or by itself.
    """
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    _set(shared, DURABLE)
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _be_the_child(job, act, rule, shared)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    promised = Generation(
        term=int.from_bytes(shared[:8], "big"), step=int.from_bytes(shared[8:16], "big")
    )
    told = shared[16:].split(b"\0", 1)[0].decode(errors="replace")
    shared.close()
    require(code in (0, -signal.SIGKILL), f"the child ended with {code}: {told}")
    return promised


def _set(shared: mmap.mmap, generation: Generation) -> None:
    shared[:16] = generation.term.to_bytes(8, "big") + generation.step.to_bytes(8, "big")


def _be_the_child(job: Job, act: Callable[[Job], object], rule: Sudden, shared: mmap.mmap) -> None:
    code = 1
    try:
        job.promise = lambda generation: _set(shared, generation)
        with Layer(rule).armed():
            act(job)
        code = 0
    except BaseException:
        told = traceback.format_exc()[-1500:].encode()
        shared[16 : 16 + len(told)] = told
    finally:
        os._exit(code)
