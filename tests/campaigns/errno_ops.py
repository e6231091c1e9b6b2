"""An error number at every operation of save, commit, restore, scrub and retention."""

import errno
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

from autockpt.values.errors import AutockptError
from tests.campaigns.faults import CODES, Errno, Layer, Rule, Short, passing
from tests.campaigns.framework import require
from tests.campaigns.job import ACTS, DURABLE, JOBS, Job, Scene, no_leak, require_recovery

KINDS = (*((code, sticky) for code in CODES for sticky in (False, True)), (0, False), (0, True))
"""(code, sticky); code 0 moves fewer bytes than asked for."""


class ErrnoEverywhere:
    """Every (shape, act, operation, error, one-shot or sticky), in an order that mixes them."""

    claim = "an error of the storage, once or for good, loses nothing durable and is named"

    def __init__(self, scratch: Path) -> None:
        self._scenes = [Scene(scratch, shape) for shape in JOBS]
        self._plan: list[tuple[Scene, str, int, int, bool]] = []
        for scene in self._scenes:
            for act in ACTS:
                for operation in range(len(operations(scene, ACTS[act]))):
                    self._plan += [(scene, act, operation, *kind) for kind in KINDS]
        self.distinct: int | None = len(self._plan)
        random.Random(0).shuffle(self._plan)

    def run(self, number: int, rng: random.Random) -> str:
        """One of the plan."""
        scene, act, operation, code, sticky = self._plan[number % len(self._plan)]
        rule: Rule = Errno(operation, code, sticky) if code else Short(operation, sticky)
        job, promised = scene.fresh(), [DURABLE]
        job.promise = promised.append
        what = (
            f"{act} of {scene.shape}, operation {operation}, {errno.errorcode.get(code, 'short')}"
        )
        with no_leak():
            outcome = attack(job, act, rule, what, cause=os.strerror(code) if code else "")
        require(code or outcome == "done", f"{what}: a short count is no failure")
        try:
            require_recovery(job, max(promised))
        except Exception as error:
            raise AssertionError(f"{what} (sticky {sticky}), then: {error!r}") from error
        scene.require_foreign_untouched()
        return outcome

    def close(self) -> None:
        """Nothing stays open."""


def attack(job: Job, act: str, rule: Rule, what: str, *, cause: str) -> str:
    """Carries an act out under a rule; what became of it.

    Errors say the cause and the file, by which they say the rank.
    """
    layer = Layer(rule)
    try:
        with layer.armed():
            ACTS[act](job)
    except AutockptError as error:
        named = {_as_told(file) for file in layer.failed} or {job.path}
        told = any(one in str(error) for one in named)
        require(told, f"{what}: the error names none of {sorted(named)}: {error}")
        require(cause in str(error), f"{what}: the error does not name the cause: {error}")
        return "refused"
    except OSError as error:
        raise AssertionError(f"{what}: a bare {error!r}") from error
    return "done"


def _as_told(file: str) -> str:
    """A file under the name that it was to get, and by the shortest way to it."""
    if "/spare/" in file:
        return "/shard-"
    return os.path.normpath(re.sub(r"\.[0-9a-f]{12}\.tmp$", "", file))


def operations(scene: Scene, act: Callable[[Job], object]) -> list[bool]:
    """The operations of an act, undisturbed: of each, whether it changes anything."""
    job, layer = scene.fresh(), Layer(passing)
    with layer.armed():
        act(job)
    return layer.changes
