"""One run: trainer and keeper are killed after given stretches of training, and started again.

    python -m benchmarks.kills.launcher '{"run_directory": ..., "size": ..., "exposures_s": [...]}'

Failures come every few seconds here instead of every few days, and restarts have to shrink with
them: this launcher forks a process that has torch loaded, so that the next trainer is there in
milliseconds.  Everything else (keeper, commit, restore, controller) is the real one.  A stretch
begins with the first iteration after a start, so that all runs of a schedule are killed after the
same training.  Prints one JSON object.
"""

import contextlib
import importlib
import json
import mmap
import os
import select
import signal
import struct
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from benchmarks.job import Job
from benchmarks.kills import trainer

START_S = 60.0
"""A trainer that has not begun by then is given up."""
CELL = struct.Struct("qq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to run."""

    size: str
    tokens: int
    exposures_s: tuple[float, ...]
    """Training between starts and kills; the last one is the end."""
    quiet_s: float
    """Training without autockpt before and after, to know what an iteration takes at that time."""
    run_directory: str


@dataclass(slots=True, kw_only=True)
class Account:
    """How it went."""

    steps: int = 0
    """Iterations that counted at the end."""
    iteration_s: float = 0.0
    """Of the training alone, before and after."""
    wall_s: float = 0.0
    """From the first iteration of the first start to the end."""
    recoveries_s: list[float] = field(default_factory=list)
    """From each kill to the first iteration after it."""
    lost_steps: list[int] = field(default_factory=list)
    """Done before each kill and to be done again."""
    fresh_starts: int = 0
    """Restarts from nothing: all that had been saved died with the keeper."""


class Cell:
    """Steps done and the keeper's pid, written by the trainer, readable after its death."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, CELL.size)

    def write(self, steps: int, keeper: int) -> None:
        """Both at once."""
        CELL.pack_into(self._memory, 0, steps, keeper)

    def read(self) -> tuple[int, int]:
        """(steps, keeper's pid or 0)."""
        steps, keeper = CELL.unpack_from(self._memory, 0)
        return int(steps), int(keeper)


class Run:
    """Starts, kills and counts."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._cell = Cell()
        self.account = Account()

    def go(self) -> Account:
        """All stretches; leaves no process behind."""
        account, before, killed_s = self.account, 0, 0.0
        quiet = [self._quiet_iteration_s()]
        for exposure_s in self._order.exposures_s:
            pid, began_s, first = self._started()
            if killed_s:
                account.recoveries_s.append(began_s - killed_s)
                account.lost_steps.append(max(0, before - first))
            if not account.wall_s:
                account.wall_s = -began_s
            time.sleep(max(0.0, began_s + exposure_s - time.monotonic()))
            killed_s = time.monotonic()
            before = self._kill(pid)
        account.steps, account.wall_s = before, account.wall_s + killed_s
        quiet.append(self._quiet_iteration_s())
        account.iteration_s = fmean(quiet)
        return account

    def _quiet_iteration_s(self) -> float:
        pid = self._forked(protected=False)
        began_s, first = time.monotonic(), self._cell.read()[0]
        time.sleep(self._order.quiet_s)
        ended_s = time.monotonic()
        return (ended_s - began_s) / max(1, self._kill(pid) - first)

    def _started(self) -> tuple[int, float, int]:
        """(pid, when its first iteration ended, the step it resumed from)."""
        for fresh in (False, True):
            pid = self._forked(fresh=fresh)
            if pid:
                return pid, time.monotonic(), self._cell.read()[0] - 1
            # What was in memory only died with the keeper, and nothing was on disk yet.
            self.account.fresh_starts += 1
        raise RuntimeError(f"no trainer began within {START_S:.0f} s; its output is above")

    def _forked(self, *, fresh: bool = False, protected: bool = True) -> int:
        """A trainer that has done its first iteration; 0 if it never did."""
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            self._child(writer, fresh=fresh, protected=protected)
        os.close(writer)
        try:
            if select.select([reader], [], [], START_S)[0] and os.read(reader, 1):
                return pid
        finally:
            os.close(reader)
        self._kill(pid)
        return 0

    def _kill(self, pid: int) -> int:
        """The trainer and its keeper; the steps that were done."""
        steps, keeper = self._cell.read()
        for victim in (pid, keeper):
            with contextlib.suppress(ProcessLookupError):
                if victim:
                    os.kill(victim, signal.SIGKILL)
        os.waitpid(pid, 0)
        self._cell.write(steps, 0)
        return steps

    def _child(self, ready: int, *, fresh: bool, protected: bool) -> None:
        """Never returns."""
        if fresh:
            os.environ["AUTOCKPT_FRESH"] = "1"
        told = False

        def tell(steps: int, session: Any) -> None:
            nonlocal told
            keeper = session.keeper_pid if session is not None else 0
            self._cell.write(steps, keeper or 0)
            if not told:
                told = True
                os.write(ready, b"1")

        try:
            trainer.train(
                self._order.size,
                self._order.tokens,
                steps=trainer.FOREVER,
                run_directory=self._order.run_directory if protected else None,
                told=tell,
            )
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def main() -> None:
    """The order is the argument, the account the output."""
    import torch

    torch.set_num_threads(1)
    for name in ("api", "session.job", "session.mind", "session.training"):
        importlib.import_module(f"autockpt.{name}")  # so that a start takes no import
    data = json.loads(sys.argv[1])
    Job("1m", 8).iterate()  # what torch loads at the first step of an optimizer
    order = Order(**{**data, "exposures_s": tuple(data["exposures_s"])})
    os.environ["AUTOCKPT_NO_PROFILE"] = "1"
    print(json.dumps(asdict(Run(order).go())))


if __name__ == "__main__":
    main()
