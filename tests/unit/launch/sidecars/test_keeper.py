"""The keeper of a node, as its launcher tells of it."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autockpt.console import Console
from autockpt.executors.keeper.launch import keeper_status
from autockpt.launch.sidecars.keeper import KeeperBeside
from autockpt.run_directory import RunDirectory
from tests.support import trainings


def held(run_dir: str) -> tuple[str, str]:
    """The newest checkpoints in memory and on disk, when nothing changes any more."""
    found = []
    while len(found) < 3 or len(set(found[-3:])) > 1:
        time.sleep(0.1)
        status = keeper_status(run_dir, 0)
        assert status is not None
        found.append((status.memory_committed, status.durable))
    return found[-1]


@pytest.mark.parametrize("disk", [1, 1000])
def test_a_launcher_that_waits_no_longer_names_the_newest_checkpoint_in_memory(
    attach: Callable[..., Any],
    new_run: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    disk: int,
) -> None:
    """Where none on disk is as new: a start that comes soon has it."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=disk))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = attach(model=model, optimizer=optimizer, run_dir=run_dir)
    for _ in ckpt.steps(100):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        in_memory, on_disk = held(run_dir)
        if in_memory and (in_memory == on_disk) == (disk == 1):
            break
    beside = KeeperBeside(RunDirectory(run_dir), Console())
    beside.start(0)
    beside.release(by_s=time.monotonic())
    said = capsys.readouterr().err
    assert "the keeper is still at work" in said
    alone = f"its memory alone has the newest checkpoint, {in_memory}"
    assert (alone in said) == (disk > 1)
