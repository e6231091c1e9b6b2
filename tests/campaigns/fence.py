"""A coordinator that stands still, is replaced, and wakes up: nothing it says then may be wrong.

It is stopped by SIGSTOP before some operation of a save; another one claims the directory, decides
and saves; then SIGCONT.  Clocks of both jump by up to ten years.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autockpt.values.errors import AutockptError
from autockpt.values.generation import Generation
from tests.campaigns.faults import Call, Layer
from tests.campaigns.framework import require
from tests.campaigns.job import ACTS, DURABLE, SHAPES, Job, Scene, no_leak, require_recovery
from tests.campaigns.kill_ops import changing

JUMPS_S = (0.0, -1.0, 1.0, 3600.0, -3600.0, -86400.0, 3.2e8, -3.2e8)


@dataclass(frozen=True, slots=True)
class Stop:
    """The process stands still before operation number `at`."""

    at: int

    def __call__(self, call: Call, real: Callable[..., Any], args: Any, more: Any) -> Any:
        if call.number == self.at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args, **more)


class FenceRaces:
    """Every (shape, operation of a save, jump of either clock)."""

    claim = "a coordinator that was replaced while it stood still promises nothing that is lost"

    def __init__(self, scratch: Path) -> None:
        self._plan = [
            (scene, operation)
            for scene in (Scene(scratch, shape) for shape in SHAPES)
            for operation in changing(scene, ACTS["save"])
        ]
        self._jumps = list(itertools.product(JUMPS_S, JUMPS_S))
        self.distinct: int | None = len(self._plan) * len(self._jumps)
        random.Random(0).shuffle(self._plan)
        random.Random(0).shuffle(self._jumps)

    def run(self, number: int, rng: random.Random) -> str:
        """One of the plan; when all of it was played, again with other jumps."""
        jumps, place = divmod(number, len(self._plan))
        scene, operation = self._plan[place]
        theirs, ours = self._jumps[jumps % len(self._jumps)]
        job = scene.fresh()
        pid, said = _zombie(job, operation, theirs)
        _, status = os.waitpid(pid, os.WUNTRACED)
        after = Job(path=job.path, shape=job.shape)
        with no_leak(), jumped(ours):
            choice = after.start("after")
            require(choice is not None, "nothing to go on from")
            assert choice is not None
            if os.WIFSTOPPED(status):
                os.kill(pid, signal.SIGCONT)
                os.waitpid(pid, 0)
            promised = os.read(said, 16) == b"durable"
            os.close(said)
            if promised:
                newest = Generation(term=1, step=4)
                require(choice.generation >= newest, f"{newest} was promised after the takeover")
            restored = require_recovery(after, max(DURABLE, choice.generation))
        require(restored.term < 3, f"restored {restored}")
        scene.require_foreign_untouched()
        return "promised before the takeover" if promised else "fenced"

    def close(self) -> None:
        """Nothing stays open."""


def _zombie(job: Job, operation: int, jump_s: float) -> tuple[int, int]:
    """(pid, pipe) of a coordinator that saves, and says `durable` when it is told so."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        with jumped(jump_s), Layer(Stop(operation)).armed():
            ACTS["save"](job)
        os.write(writer, b"durable")
    except AutockptError:
        pass  # it was fenced, and knows
    finally:
        os._exit(0)


class jumped:
    """Inside the block the wall clock is so many seconds off."""

    def __init__(self, jump_s: float) -> None:
        self._jump_s, self._real = jump_s, time.time

    def __enter__(self) -> None:
        time.time = lambda: self._real() + self._jump_s

    def __exit__(self, *_: object) -> None:
        time.time = self._real
