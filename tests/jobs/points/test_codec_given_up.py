"""A real run gives up a codec whose checkpoints are late: bytes are written as they are then."""

import time
from dataclasses import replace

import pytest

from autockpt.run_directory import RunDirectory
from autockpt.session.boundaries import iteration_clock
from autockpt.session.tuning import autotuner
from autockpt.values.goal import Goal, Pins
from autockpt.values.telemetry import CheckpointDurable, PlanChanged
from tests.support import trainings
from tests.support.live import PATIENCE_S, Live, granted
from tests.support.profiles import example_profile, example_state

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY = 8
STATE_BYTES = 52_600
"""About that of the job: a profile of another size would not be believed."""
PLANES = {"parameters": "planes", "moments": "planes"}


def test_saves_are_written_as_they_are_once_the_codec_is_given_up(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile promised them at once without; the plan, its file and the next save follow."""
    monkeypatch.setattr(iteration_clock, "BLOCK_S", 0.05)
    monkeypatch.setattr(autotuner, "THINK_S", 0.02)
    files = RunDirectory.create(live.run_dir)
    profile = example_profile(persist_s=1e-6, state=example_state(STATE_BYTES))
    # No codec was measured: else it would be taken for storage that is slower than profiled.
    files.write_profile(replace(profile, codecs=()))
    start = trainings.plan(memory=EVERY, disk=EVERY, version=1, retune=True, codec=PLANES)
    goal = Goal(pins=Pins(memory_interval_steps=EVERY, disk_interval_steps=EVERY))
    job, ckpt = live.attach(plan=start, goal=goal)
    deadline, changed = time.monotonic() + 2 * PATIENCE_S, 0
    for step, batch in ckpt.batches(100_000):
        trainings.train_step(job, step, batch)
        if (step + 1) % EVERY == 0:
            ckpt.wait_durable(PATIENCE_S)  # a slot is free again
            granted(ckpt)
            # On a busy machine ways to copy a snapshot may take turns before.
            changes = [e for e in live.events(PlanChanged) if "with planes" in e.reason]
            if changes and not changed:
                changed = changes[0].step
            if changed and step > changed + 3 * EVERY:
                break
        assert time.monotonic() < deadline
    change = changes[0]
    assert "with planes checkpoints are durable after" in change.reason
    assert (change.memory_interval_steps, change.disk_interval_steps) == (EVERY, EVERY)
    saves = {e.step: e.stored_bytes / e.bytes for e in live.events(CheckpointDurable) if e.bytes}
    before = [share for at, share in saves.items() if at < changed]
    after = [share for at, share in saves.items() if changed < at <= changed + 3 * EVERY]
    assert before
    assert after
    assert min(before) != 1.0
    assert set(after) == {1.0}
