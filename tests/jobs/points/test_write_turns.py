"""Real checkpoints that try ways of writing in turn: each is written so, is whole, and is timed."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.run_directory import RunDirectory
from autockpt.values.plan import Staging
from autockpt.values.telemetry import CheckpointDurable, SettingMeasured
from tests.support import trainings
from tests.support.live import PATIENCE_S, Live, granted

pytestmark = pytest.mark.usefixtures("one_thread")

SAVES = 8


def test_checkpoints_take_the_ways_of_the_plan_in_turn(live: Live) -> None:
    """Another number of writers, larger chunks, the page cache: all are durable, each is told."""
    now = Staging(chunk_bytes=2**16).write_way
    ways = (
        now,
        replace(now, writers=1, direct_io=False),
        replace(now, chunk_bytes=2**18),
    )
    staging = Staging(chunk_bytes=now.chunk_bytes, compare_writes=ways)
    plan = replace(trainings.plan(memory=1, disk=1, version=1), staging=staging)
    job, ckpt = live.attach(plan=plan)
    for step, batch in ckpt.batches(SAVES):
        trainings.train_step(job, step, batch)
        ckpt.wait_durable(PATIENCE_S)
        granted(ckpt)
    durable = {event.step for event in live.events(CheckpointDurable)}
    tried = live.events(SettingMeasured)
    assert {event.setting for event in tried} == set(map(str, ways))
    for event in tried:
        assert event.decision == "write"
        assert event.setting == str(staging.write_way_of(event.step))
        assert event.step in durable
        assert event.durable_s > 0
        assert event.iterations >= 1
    kept = Path(RunDirectory(live.run_dir).checkpoints())
    texts = {}
    for path in kept.rglob("COMMIT*"):
        with contextlib.suppress(FileNotFoundError):  # retention goes on
            texts[path.parent.name] = path.read_text()
    assert texts
    for name, text in texts.items():
        chunk = staging.write_way_of(int(name[-8:])).chunk_bytes
        assert f'"chunk_bytes":{chunk}' in text.replace(" ", ""), name
    assert len({staging.write_way_of(int(name[-8:])).chunk_bytes for name in texts}) == 2
