"""Trainings on any mesh as real processes: what the tests of this folder start and compare."""

import itertools
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conftest import end_keeper, keeper_pids
from tests.jobs.kill.zygote import Zygote
from tests.jobs.parallel.meshes import MESHES
from tests.jobs.parallel.ruled import RULED
from tests.support import trainings

SAVED_STEPS, MORE_STEPS = 3, 2
PATIENCE_S = 90.0
"""No training here needs more than a few seconds; a loaded machine may."""
_launches = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the ranks of one training saw, put together."""

    start: int
    attached: dict[str, torch.Tensor]
    saved: dict[str, torch.Tensor]
    ended: dict[str, torch.Tensor]
    losses: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A run that was trained on one mesh, saved, and trained on."""

    run_dir: Path
    seen: Seen


class Failed(Exception):
    """A rank ended with an error; the text is what all of them said."""


class Matrix:
    """Starts trainings, and keeps what each mesh saved for all that resume from it."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self._zygote = zygote
        self._folder = folder
        self._sources: dict[str, Saved] = {}
        self._served: set[str] = set()
        """Run directories that may have a keeper."""

    def source(self, mesh: str) -> Saved:
        """A run saved by this mesh, trained once."""
        if mesh not in self._sources:
            run_dir = self.new_run(mesh)
            seen = self.train(mesh, run_dir, seed=1, more=MORE_STEPS)
            wait_drained(run_dir)
            self._served.discard(str(run_dir))
            self._sources[mesh] = Saved(run_dir=run_dir, seen=seen)
        return self._sources[mesh]

    def new_run(self, name: str, *, memory: int = 100, disk: int = 100) -> Path:
        """An empty run directory; with 100 a checkpoint is only made of the last step."""
        out = self._folder / f"{name}-{next(_launches)}"
        return Path(trainings.prepare(out, trainings.plan(memory=memory, disk=disk)))

    def copy(self, saved: Saved) -> Path:
        """A run directory with the same checkpoints, for somebody else to resume."""
        path = self.new_run("copy")
        shutil.copytree(saved.run_dir / "checkpoints", path / "checkpoints")
        return path

    def train(
        self, mesh: str, run_dir: Path, *, seed: int = 2, steps: int = SAVED_STEPS,
        end: str = "save", more: int = 0, tied: bool = False, **how: bool,
    ) -> Seen:  # fmt: skip
        """One training to its end, see `rank.train`.  Raises Failed with what its ranks said."""
        out = self._folder / f"out-{next(_launches)}"
        self._served.add(str(run_dir))
        order = {
            "mesh": mesh, "seed": seed, "run_dir": str(run_dir), "out": str(out), "steps": steps,
            "end": end, "more": more, "tied": tied, **how,
        }  # fmt: skip
        try:
            self._run({**MESHES, **RULED}[mesh].ranks, order, out)
        finally:
            if end == "leave":
                self._end_keeper(str(run_dir))
        parts = [torch.load(path) for path in sorted(out.glob("rank-*.pt"))]
        return _together(parts)

    def _run(self, ranks: int, order: dict[str, Any], out: Path) -> None:
        launch = f"matrix-{os.getpid()}-{next(_launches)}"
        pids: dict[int, int] = {}
        try:
            for rank in range(ranks):
                (out / str(rank)).mkdir(parents=True)
                pids[rank] = self._zygote.call(
                    "tests.jobs.parallel.rank:train", order, out / str(rank), RANK=str(rank),
                    WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
                    AUTOCKPT_LAUNCH_ID=launch,
                )  # fmt: skip
            self._wait(list(pids.values()), out, -signal.SIGKILL if order["end"] == "die" else 0)
        finally:
            for pid in pids.values():
                self._zygote.kill(pid)
                self._zygote.status(pid, wait_s=PATIENCE_S)

    def _wait(self, pids: list[int], out: Path, expected: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ended = [self._zygote.status(pid, wait_s=0.005) for pid in pids]
            if all(status == expected for status in ended):
                return
            if any(status not in (None, expected) for status in ended):
                # The others may be saying the same, or wait for those that are gone.
                deadline = min(deadline, time.monotonic() + 2.0)
            if None not in ended or time.monotonic() > deadline:
                logs = [path.read_text() for path in sorted(out.glob("*/log"))]
                raise Failed("\n---\n".join([f"exit statuses {ended}", *logs]))

    def close(self) -> None:
        """No keeper survives."""
        for run_dir in list(self._served):
            self._end_keeper(run_dir)

    def _end_keeper(self, run_dir: str) -> None:
        end_keeper(run_dir)
        self._served.discard(run_dir)


def complaints(run_dir: Path) -> list[str]:
    """What went wrong behind the training's back."""
    bad = {"Degraded", "SnapshotDiscarded"}
    lines = [
        line for path in (run_dir / "telemetry").iterdir() for line in path.read_text().splitlines()
    ]
    return [line for line in lines if json.loads(line)["event"] in bad]


def sources(run_dir: Path) -> list[str]:
    """Where the ranks of a run came back from, oldest first: memory or disk."""
    lines = (run_dir / "telemetry" / "keeper-000.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["source"] for event in events if event["event"] == "Restored"]


def wait_drained(run_dir: Path) -> None:
    """The keeper has written and read back everything, and has left."""
    deadline = time.monotonic() + PATIENCE_S
    while keeper_pids(str(run_dir)):
        assert time.monotonic() < deadline, f"{run_dir}: its keeper does not leave"
        time.sleep(0.02)


def _together(parts: list[dict[str, Any]]) -> Seen:
    """One state of all ranks: where two say the same tensor, both say the same bits."""
    losses: dict[int, list[float]] = {}
    for step, loss in [item for part in parts for item in part["losses"].items()]:
        losses.setdefault(step, []).extend([] if loss is None else [loss])
    return Seen(
        start=parts[0]["start"],
        losses={step: sum(of) / len(of) for step, of in losses.items()},
        **{kind: _union([part[kind] for part in parts]) for kind in ("attached", "saved", "ended")},
    )


def _union(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            known = found.setdefault(name, tensor)
            assert same(known, tensor), f"{name}: ranks disagree"
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.contiguous().flatten().view(torch.uint8).equal(
            other.contiguous().flatten().view(torch.uint8)
        )
    )  # fmt: skip


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one of them has, or that differ in a bit."""
    found = [f"only in one: {name}" for name in sorted(set(one) ^ set(other))]
    both = sorted(set(one) & set(other))
    return found + [f"differs: {name}" for name in both if not same(one[name], other[name])]
