"""A real run whose disk breaks and is mended: saving goes on, status.json and `show` tell it."""

import json
from pathlib import Path

import pytest

from autockpt.cli.app import run
from autockpt.cli.jobs.outcome import before, finish
from autockpt.console import Console
from autockpt.launch.elastic.request import Ending
from autockpt.launch.script import Script
from autockpt.run_directory import RunDirectory
from autockpt.values.telemetry import PersistFailed
from tests.support import trainings
from tests.support.live import PATIENCE_S, Live, granted, room_for_one

STORE = Path(__file__).parent / "failing_store"
SPEC = trainings.JobSpec(steps=16)
PLAN = trainings.plan(memory=2, disk=2)
BREAKS, LEAVES = 5, 11


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The disk fails while this file exists."""
    monkeypatch.setenv("FAILING_STORE", str(tmp_path / "broken"))
    monkeypatch.setenv("PYTHONPATH", str(STORE))
    return tmp_path / "broken"


def ended(live: Live) -> RunDirectory:
    """The run as its launcher leaves it."""
    live.leave()
    files = RunDirectory.open(live.run_dir)
    script = Script(target="train.py", module=False, args=(), shown="train.py")
    finish(
        files,
        Ending(state="interrupted", exit_code=1, restarts=0),
        script,
        Console(),
        before(files),
    )
    return files


def test_a_broken_disk_is_told_until_it_is_mended(
    live: Live, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tier, time, last error and what is done; nothing of it once a checkpoint is durable again."""
    job, ckpt = live.attach(SPEC, PLAN)
    for step, batch in ckpt.batches(SPEC.steps):
        if step == BREAKS:
            broken.touch()
        if step == LEAVES:
            break
        trainings.train_step(job, step, batch)
        granted(ckpt)
    files = ended(live)
    status = files.read_status()
    assert status is not None
    (tier,) = status.degraded
    assert tier.tier == "disk"
    assert tier.since.endswith("Z")
    assert "Input/output error" in tier.because
    assert "tried again" in tier.doing
    assert f"warning: {tier}" in capsys.readouterr().err
    assert run(["show", live.run_dir, "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["degraded"]
    assert shown["because"] == tier.because
    broken.unlink()
    job, ckpt = live.attach(SPEC, PLAN)
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
        granted(ckpt)
    status = ended(live).read_status()
    assert status is not None
    assert status.degraded == ()


def test_one_slot_saves_again_when_the_disk_is_mended(live: Live, broken: Path) -> None:
    """What the disk refused does not keep the only slot; each save is tried."""
    plan = trainings.plan(memory=0, disk=4, slots=1)
    job, ckpt = live.attach(SPEC, plan, room_for_one(live, SPEC, plan))
    link = ckpt._client
    for step, batch in ckpt.batches(SPEC.steps):
        if step == BREAKS:
            broken.touch()
        if step == LEAVES:
            broken.unlink()
        if step in (2, 3):  # refused two, then given one
            assert link.wait_until(lambda: bool(link.slots or link.slots_refused), PATIENCE_S)
        granted(ckpt)
        trainings.train_step(job, step, batch)
    assert len(link.slots) == 1
    live.leave()
    assert set(live.durable_steps()) == {4, 12, 16}
    assert 8 in {event.step for event in live.events(PersistFailed)}
