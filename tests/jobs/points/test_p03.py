"""Point 3: the copy runs under the next forward (builtin:easyckpt) or inside the boundary."""

import threading
import time
from typing import Any

import pytest

from autockpt.executors.snapshot import copy_engine
from tests.jobs.points.presets import preset_plan
from tests.support import trainings
from tests.support.live import PATIENCE_S, SPEC, Live, granted

NEVER_S = 0.3
"""A boundary that copies inside itself cannot be left, however long the copy waits for that."""


@pytest.mark.parametrize(
    ("preset", "schedule"), [("easyckpt", "lazy"), ("dlrover", "blocking")], ids=str
)
def test_the_forward_starts_before_the_copy_ends_only_if_it_is_lazy(
    preset: str, schedule: str, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the copy thread copies waits for the next forward; only a lazy copy sees it begin.

    The training's own thread copies the probed tensors of a lazy one first, inside the boundary.
    """
    whole = trainings.bare(trainings.build(SPEC))
    forward_began = threading.Event()
    saw_forward: list[bool] = []
    memcpy = copy_engine._memcpy

    def throttled(job: copy_engine.CopyJob, *rest: Any) -> None:
        by_the_copy_thread = threading.current_thread() is not threading.main_thread()
        lazy = schedule == "lazy"
        # Behind the forward a blocking copy is that of a later boundary: `busy` says so.
        if by_the_copy_thread and not saw_forward and (lazy or not forward_began.is_set()):
            saw_forward.append(forward_began.wait(PATIENCE_S if lazy else NEVER_S))
        memcpy(job, *rest)

    job, ckpt = live.attach(plan=preset_plan(preset, memory=4, disk=4))
    monkeypatch.setattr(copy_engine, "_memcpy", throttled)
    busy: list[bool] = []

    def forward(*_: object) -> None:
        assert ckpt._rank.snapshotter is not None
        if ckpt.step_count == 4:
            # A blocking copy is over; its thread may have to report that yet.
            until_s = time.monotonic() + (0.0 if schedule == "lazy" else NEVER_S / 2)
            while (busy_now := ckpt._rank.snapshotter.engine.busy) and time.monotonic() < until_s:
                time.sleep(0.001)
            busy.append(busy_now)
            forward_began.set()

    job.model.register_forward_pre_hook(forward)
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
        granted(ckpt)
    # The training's thread may have copied all of a blocking one before the other one woke.
    assert saw_forward == [True] if schedule == "lazy" else saw_forward in ([], [False])
    assert busy == [schedule == "lazy"]
    assert trainings.digest(job) == whole
