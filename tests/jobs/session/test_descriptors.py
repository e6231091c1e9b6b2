"""Open files of a session keep clear of the numbers that a script uses, and closes twice."""

import os
from collections.abc import Callable
from typing import Any

import torch

from autockpt import new_files
from tests.support import trainings


def numbers() -> set[int]:
    """Descriptors of this process."""
    return {int(name) for name in os.listdir("/proc/self/fd")}


def test_all_descriptors_of_a_session_have_high_numbers(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    run_dir = trainings.prepare(new_run("numbers"), trainings.plan(memory=1, disk=2))
    before = numbers()
    ckpt = attach(model, optimizer, run_dir=run_dir)
    ours: dict[int, str] = {}
    for step in ckpt.steps(6):
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        assert step == 0 or ckpt._client.wait_until(lambda: bool(ckpt._client.slots), 60)
        for number in numbers() - before:
            try:
                ours[number] = os.readlink(f"/proc/self/fd/{number}")
            except OSError:  # the listing itself
                continue
    assert ckpt.wait_durable(60)
    assert sum(number >= new_files.FIRST_CLEAR_DESCRIPTOR for number in ours) >= 4, ours
    low = {number: name for number, name in ours.items() if number < 512}
    assert not [name for name in low.values() if run_dir in name or "socket" in name], low
    assert not [name for name in low.values() if "memfd" in name], low
