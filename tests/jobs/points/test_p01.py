"""Point 1: the persist runs beside the training (builtin:async) or in its way (builtin:sync)."""

import os
import signal
import threading

import pytest

from tests.jobs.points.presets import preset_plan
from tests.support import trainings
from tests.support.live import PATIENCE_S, Live, durable, granted


@pytest.mark.parametrize("persist", ["async", "sync"])
def test_the_next_step_ends_before_the_persist_only_if_it_is_asynchronous(
    persist: str, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper is stopped at the boundary of step 4, so that its persist cannot end by chance."""
    job, ckpt = live.attach(plan=preset_plan(persist, memory=4, disk=4))
    keeper, fourth = ckpt.keeper_pid, ckpt._rank.generation(4)
    assert keeper is not None
    waits, durable_at_release = threading.Event(), []
    wait_durable = ckpt._saver.wait_durable

    def wait_watched(generation: object, timeout_s: float) -> bool:
        waits.set()
        return wait_durable(generation, timeout_s)  # type: ignore[arg-type]

    def release() -> None:
        if waits.wait(PATIENCE_S):
            durable_at_release.append(durable(ckpt, fourth))
            os.kill(keeper, signal.SIGCONT)

    monkeypatch.setattr(ckpt._saver, "wait_durable", wait_watched)
    releaser = threading.Thread(target=release, daemon=True)
    at_next_step = None
    try:
        for step, batch in ckpt.batches(6):
            trainings.train_step(job, step, batch)
            if step == 3:
                granted(ckpt)
                os.kill(keeper, signal.SIGSTOP)
                if persist == "sync":
                    releaser.start()
            elif step == 4:
                at_next_step = durable(ckpt, fourth)
                assert waits.is_set() == (persist == "sync")
                os.kill(keeper, signal.SIGCONT)
                assert ckpt.wait_durable(PATIENCE_S) > 0
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert at_next_step == (persist == "sync")
    assert durable_at_release == ([False] if persist == "sync" else [])
