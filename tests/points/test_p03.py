"""Point 3, lazy copies: the forward starts before the copy has ended, the update never does."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from autockpt.executors import snapshot as snapshots
from tests.points.loops import Loop, prepared

STATE_BYTES = 2**20
PIECE_BYTES = 2**16


@pytest.mark.parametrize("schedule", ["lazy", "blocking"])
def test_the_forward_starts_before_the_copy_ends_only_when_lazy(
    schedule: str, attach: Callable[..., Any], new_run: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A copy slowed to 2 ms per piece; observed at the forward and right after the update."""
    monkeypatch.setattr(snapshots, "PIECE_BYTES", PIECE_BYTES)
    memcpy = snapshots.ctypes.memmove

    class Slow:
        """ctypes with a slow memmove."""

        @staticmethod
        def memmove(*arguments: int) -> None:
            time.sleep(0.002)
            memcpy(*arguments)

    monkeypatch.setattr(snapshots, "ctypes", Slow)
    loop = Loop(attach, prepared(new_run, schedule=schedule), STATE_BYTES)
    loop.warm_up()
    engine = loop.ckpt._snapshotter.engine
    at_forward: list[bool] = []
    at_update: list[bool] = []
    loop.model.register_forward_pre_hook(lambda *_: at_forward.append(engine.busy))
    loop.optimizer.register_step_post_hook(lambda *_: at_update.append(engine.busy))
    for _ in range(6):
        loop.train()
        loop.ckpt.step()
    sealed = loop.events("SnapshotSealed")
    assert len(sealed) >= 2
    assert not any(at_update)
    if schedule == "lazy":
        assert any(at_forward)
        assert all(event["boundary_stall_s"] < event["copy_s"] for event in sealed)
    else:
        assert not any(at_forward)
        assert all(event["boundary_stall_s"] > 0.02 for event in sealed)
