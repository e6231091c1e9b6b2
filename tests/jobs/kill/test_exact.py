"""State is restored bit-exactly, whatever it consists of.

Every case trains to some step, ends, is continued by a new process from disk, and must end in the
digest of a training that was never interrupted.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import end_keeper
from tests.jobs.kill.forked_keepers import FORKED_KEEPERS
from tests.jobs.kill.zygote import Zygote
from tests.support import trainings
from tests.support.trainings import JobSpec

WAIT_S = 90.0
STEPS = 19


def finished(
    zygote: Zygote, spec: JobSpec, run_dir: str, out: Path, *, attach: bool = True
) -> list[dict[str, object]]:
    """Runs a training to its end; what it said."""
    out.mkdir(exist_ok=True)
    pid = zygote.start(trainings.spec_data(spec), run_dir, out, attach=attach, **FORKED_KEEPERS)
    assert zygote.finish(pid, out / "log", wait_s=WAIT_S) == 0, (out / "log").read_text()
    return [fact for fact in trainings.said(out) if fact["pid"] == pid]


def check(zygote: Zygote, tmp_path: Path, spec: JobSpec, *stops: int) -> None:
    """Ends at each of these steps and is continued by a new process; compares the end."""
    run_dir = trainings.prepare(tmp_path / "run", trainings.plan(memory=3, disk=6))
    whole = finished(zygote, spec, "", tmp_path / "bare", attach=False)[-1]["digest"]
    at = 0
    try:
        for steps in (*stops, spec.steps):
            grown = spec.grow_at is not None and spec.grow_at < at
            part = replace(spec, steps=steps, grow_at=0 if grown else spec.grow_at)
            facts = finished(zygote, part, run_dir, tmp_path / f"to-{steps}")
            assert facts[0]["step"] == at
            assert "degraded" not in (tmp_path / f"to-{steps}" / "log").read_text()
            at = steps
    finally:
        end_keeper(run_dir)
    assert facts[-1]["digest"] == whole


@pytest.mark.parametrize("optimizer", sorted(trainings.OPTIMIZERS))
def test_every_optimizer_goes_on_exactly(optimizer: str, zygote: Zygote, tmp_path: Path) -> None:
    """Moments, counters, tensors as learning rate, lists, states that exist before any step."""
    check(zygote, tmp_path, JobSpec(steps=STEPS, optimizer=optimizer, seed=3), 11)


@pytest.mark.parametrize(
    "spec",
    [
        JobSpec(steps=STEPS, model="tied"),
        JobSpec(steps=STEPS, model="odd", optimizer="sgd"),
        JobSpec(steps=STEPS, model="bf16"),
        JobSpec(steps=STEPS, model="bf16", optimizer="fp32-states"),
        JobSpec(steps=STEPS, scaler=True),
        JobSpec(steps=STEPS, two_optimizers=True),
        JobSpec(steps=STEPS, two_optimizers=True, scaler=True, optimizer="sgd"),
        JobSpec(steps=STEPS, grow_at=5),
        JobSpec(steps=STEPS, grow_at=5, optimizer="sgd", loader="stateful"),
    ],
    ids=[
        "tied", "odd-buffers", "bf16", "bf16-fp32-states", "scaler", "two-optimizers",
        "two-optimizers-scaler", "grown-before", "grown-before-stateful",
    ],
)  # fmt: skip
def test_every_kind_of_state_goes_on_exactly(spec: JobSpec, zygote: Zygote, tmp_path: Path) -> None:
    """Aliases, odd dtypes, fp32 states of bf16 weights, a layout that changed on the way."""
    check(zygote, tmp_path, spec, 11)


@pytest.mark.parametrize("loader", ["plain", "workers", "persistent", "generator", "stateful"])
def test_the_loader_goes_on_at_its_batch(loader: str, zygote: Zygote, tmp_path: Path) -> None:
    """In the first epoch, at an epoch's last batch (8, 16), in the middle of a later one."""
    check(zygote, tmp_path, JobSpec(steps=27, loader=loader, seed=5), 3, 8, 13, 16)


def test_ranks_keep_their_own_randomness(zygote: Zygote, tmp_path: Path) -> None:
    """Two ranks with different random states each get their own back."""
    run_dir = trainings.prepare(tmp_path / "run", trainings.plan(memory=3, disk=6))
    spec = JobSpec(steps=STEPS, seed=9)

    def launch(name: str, steps: int, *, attach: bool) -> dict[int, dict[str, object]]:
        pids = {}
        for rank in range(2):
            out = tmp_path / f"{name}-{rank}"
            out.mkdir()
            pids[rank] = zygote.start(
                trainings.spec_data(replace(spec, steps=steps)), run_dir, out, attach=attach,
                RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
                AUTOCKPT_LAUNCH_ID=name, AUTOCKPT_LAUNCHER_PID=str(os.getpid()), **FORKED_KEEPERS,
            )  # fmt: skip
        for rank, pid in pids.items():
            log = tmp_path / f"{name}-{rank}" / "log"
            assert zygote.finish(pid, log, wait_s=WAIT_S) == 0, log.read_text()
        return {rank: trainings.said(tmp_path / f"{name}-{rank}")[-1] for rank in range(2)}

    whole = launch("bare", STEPS, attach=False)
    assert whole[0]["digest"] != whole[1]["digest"]
    try:
        launch("first", 11, attach=True)
        rest = launch("second", STEPS, attach=True)
    finally:
        end_keeper(run_dir)
    for rank in range(2):
        assert trainings.said(tmp_path / f"second-{rank}")[0]["step"] == 11
        assert rest[rank]["digest"] == whole[rank]["digest"], f"rank {rank}"
