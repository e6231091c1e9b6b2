"""A training with frozen weights that saves differences, through the real keeper."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import autockpt
from autockpt.executors.storage.catalogue import list_generations, verify_generation
from tests.jobs.kill.loops import Loop, prepared

NBYTES = 4 * 2**20


def test_frozen_weights_are_stored_once(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """The second checkpoint is a small file beside the first, and both are whole."""
    classes = {"parameters": "delta", "moments": "delta"}
    run_dir = prepared(new_run, codec=classes, chain=4)
    loop = Loop(attach, run_dir, NBYTES)
    loop.warm_up()
    for _ in range(5):
        loop.train()
        loop.ckpt.step()
        loop.durable()
    loop.ckpt.close(final_checkpoint=False)

    directory = str(Path(run_dir) / "checkpoints")
    records = list_generations(directory)
    first, *later = (record.bytes for record in records)
    assert first > 0.8 * NBYTES
    assert later
    assert all(count < 0.05 * NBYTES for count in later)
    assert all(verify_generation(directory, record.name).ok for record in records)
    newest = os.path.join(directory, records[-1].name)
    assert torch.equal(autockpt.load(newest)["model"]["large"], loop.model.large)
