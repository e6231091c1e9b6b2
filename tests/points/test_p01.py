"""Point 1, asynchronous persistence: the next step ends before the checkpoint is durable."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.points.loops import Loop, prepared

STATE_BYTES = 24 * 2**20
ROUNDS = 4


@pytest.mark.parametrize("persist", ["async", "sync"])
def test_the_next_step_ends_before_the_persist_only_when_asynchronous(
    persist: str, attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """Random numbers under zstd keep the keeper busy for many steps."""
    run_dir = prepared(new_run, persist=persist, codec={"parameters": "zstd"})
    loop = Loop(attach, run_dir, STATE_BYTES)
    loop.warm_up()
    next_step_ended_s = []
    for _ in range(ROUNDS):
        loop.train()
        loop.ckpt.step()  # the checkpoint is due here
        loop.train()
        next_step_ended_s.append(time.monotonic())
        loop.durable()
        loop.ckpt.step()
    durable_s = [event["at_s"] for event in loop.events("PersistCommitted")]
    assert len(durable_s) == ROUNDS
    overlapped = [
        ended < durable for ended, durable in zip(next_step_ended_s, durable_s, strict=True)
    ]
    if persist == "async":
        assert any(overlapped), (next_step_ended_s, durable_s)
    else:
        assert not any(overlapped), (next_step_ended_s, durable_s)
