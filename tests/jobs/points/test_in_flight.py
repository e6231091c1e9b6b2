"""Checkpoints in flight: one on its way to storage (builtin:checkfreq) or several (pccheck)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from autockpt.executors.keeper.client.client import KeeperClient
from autockpt.session import saving as sessions
from autockpt.values.generation import Generation
from autockpt.values.telemetry import SaveSkipped, SnapshotBegan
from tests.jobs.points.presets import preset_plan
from tests.support import trainings
from tests.support.live import PATIENCE_S, Live

STORE = Path(__file__).parent / "held_store"
SAVES = 5


@pytest.mark.parametrize(("preset", "in_flight"), [("checkfreq", 1), ("pccheck", 3)])
def test_as_many_saves_are_under_way_as_the_plan_allows(
    preset: str, in_flight: int, live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store stands still: saves begin until so many are in flight, the others are skipped."""
    held = tmp_path / "held"
    held.touch()
    monkeypatch.setenv("HELD_STORE", str(held))
    monkeypatch.setenv("PYTHONPATH", str(STORE))
    monkeypatch.setattr(sessions, "GRANT_WAIT_S", PATIENCE_S)
    spec = trainings.JobSpec(steps=2 * SAVES + 1)
    job, ckpt = live.attach(spec, preset_plan(preset, memory=0, disk=2))
    link = ckpt._client
    for step, batch in ckpt.batches(spec.steps):
        trainings.train_step(job, step, batch)
        if step == 0:
            continue
        assert link.wait_until(lambda: ckpt.ready, PATIENCE_S)
        newest = link.saves.newest_on_disk  # in memory, so that only the store is in the way
        assert newest is None or link.wait_until(_holds(link, newest.generation), PATIENCE_S)
        if step == 2 * SAVES:
            held.unlink()
            assert ckpt.wait_durable(PATIENCE_S) > 0
    began = [event.step for event in live.events(SnapshotBegan) if event.step < spec.steps]
    skipped = [event.step for event in live.events(SaveSkipped) if event.step < spec.steps]
    due = [2 * save for save in range(1, SAVES + 1)]
    assert began == due[:in_flight]
    assert skipped == due[in_flight:]


def _holds(link: KeeperClient, generation: Generation) -> Callable[[], bool]:
    return lambda: link.saves.memory_committed == generation
