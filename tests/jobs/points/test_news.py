"""What the thinking thread of a real run hears of its checkpoints, and what they were beside."""

import time
from pathlib import Path

import pytest

from autockpt.executors.keeper.client import saves
from autockpt.executors.keeper.standing.run_standing import STATUS_S
from autockpt.run_directory import RunDirectory
from autockpt.session import Session, saving
from autockpt.session.boundaries import iteration_clock
from autockpt.session.tuning import autotuner
from autockpt.tuner.online.proposals import with_intervals
from autockpt.values.telemetry import (
    CheckpointDurable,
    Event,
    IterationsTimed,
    PersistFailed,
    PlanChanged,
    SnapshotBegan,
)
from tests.support import trainings
from tests.support.live import PATIENCE_S, Live, granted

STORES = Path(__file__).parent
SAVED, HELD_S = 4, 0.2
SPEC = trainings.JobSpec(steps=1000)


def heard(ckpt: Session, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What the controller is told from now on."""
    assert ckpt._plans.tuner is not None
    controller, told = ckpt._plans.tuner._controller, list[Event]()
    observe = controller.observe

    def listen(event: Event) -> None:
        observe(event)
        told.append(event)

    monkeypatch.setattr(controller, "observe", listen)
    return told


def wait_for(told: list[Event], kind: type[Event]) -> None:
    """Until the controller has been told such an event."""
    deadline = time.monotonic() + PATIENCE_S
    while not any(isinstance(event, kind) for event in told):
        assert time.monotonic() < deadline, f"no {kind.__name__}"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_slow_checkpoint_among_many_snapshots_took_as_long_as_it_did(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is on its way to disk while memory takes more snapshots than are remembered.

    The storage stands still from that one on.  With the first one of the run there as well, two of
    three slots would be held, and memory would wait for the storage's patience.
    """
    held = tmp_path / "held"
    monkeypatch.setenv("HELD_STORE", str(held))
    monkeypatch.setenv("PYTHONPATH", str(STORES / "held_store"))
    monkeypatch.setattr(autotuner, "THINK_S", 0.02)
    monkeypatch.setattr(saves, "REMEMBERED", 32)
    monkeypatch.setattr(saving, "GRANT_WAIT_S", PATIENCE_S)
    job, ckpt = live.attach(SPEC, trainings.plan(memory=1, disk=10_000))
    told, saved_s = heard(ckpt, monkeypatch), 0.0
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
        assert step == 0 or ckpt._client.wait_until(lambda: ckpt.ready, PATIENCE_S)
        assert step < SPEC.steps - 1
        if step == SAVED - 1:
            assert ckpt.wait_durable(PATIENCE_S) > 0
            held.touch()
            ckpt.save()
            saved_s = time.monotonic()
        if sum(isinstance(event, SnapshotBegan) for event in told) > SAVED + 2 * saves.REMEMBERED:
            break
    time.sleep(max(0.0, saved_s + HELD_S - time.monotonic()))
    held.unlink()
    assert ckpt.wait_durable(PATIENCE_S) > 0
    deadline = time.monotonic() + PATIENCE_S
    while not (
        durable := [e for e in told if isinstance(e, CheckpointDurable) and e.step == SAVED]
    ):
        assert time.monotonic() < deadline, "the controller was not told"
        time.sleep(0.01)
    assert len(durable) == 1
    assert durable[0].latency_s >= HELD_S


def test_only_a_change_of_the_plan_that_is_felt_has_a_line(
    live: Live, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of intervals by a factor of two, since the last line; events have every change."""
    _, ckpt = live.attach(trainings.JobSpec(steps=9), trainings.plan(memory=4, disk=8))
    plans, rank = ckpt._plans, ckpt._plans._rank
    for memory, disk in ((4, 12), (4, 16), (6, 24), (30, 30)):
        rank.plan = with_intervals(rank.plan, memory, disk)
        plans.report_plan(7, "why")
    said = [line for line in capfd.readouterr().err.splitlines() if "from step" in line]
    assert said == [
        "autockpt: from step 7: checkpoints every 4 steps in memory, every 16 steps on disk",
        "autockpt: from step 7: checkpoints every 30 steps in memory and on disk",
    ]
    assert len(live.events(PlanChanged)) == 4


def test_the_status_says_at_once_that_a_checkpoint_protects(live: Live) -> None:
    """Without the ten seconds between two statuses."""
    job, ckpt = live.attach(trainings.JobSpec(steps=9), trainings.plan(memory=2, disk=4))
    run = RunDirectory(live.run_dir)
    began_s = time.monotonic()
    for step, batch in ckpt.batches(9):
        if step == 5:
            break
        trainings.train_step(job, step, batch)
        granted(ckpt)
    assert ckpt.wait_durable(PATIENCE_S) > 0
    while not (status := run.read_status()) or not status.protected:
        assert time.monotonic() < began_s + 0.8 * STATUS_S, status
        time.sleep(0.05)


def test_an_iteration_in_which_a_save_began_and_ended_is_no_quiet_one(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long iterations, quick storage: at every boundary all is durable.  A copy to memory alone
    counts for nothing."""
    monkeypatch.setattr(iteration_clock, "BLOCK_S", 0.0)
    job, ckpt = live.attach(trainings.JobSpec(steps=14), trainings.plan(memory=2, disk=4))
    for step, batch in ckpt.batches(14):
        trainings.train_step(job, step, batch)
        granted(ckpt)
        ckpt.wait_durable(PATIENCE_S)
    blocks = {event.step: event for event in live.events(IterationsTimed)}
    durable = {event.step for event in live.events(CheckpointDurable)} - {14}
    assert durable == {2, 4, 8, 12}  # the first one goes to disk, whatever the interval
    assert {step for step, block in blocks.items() if block.busy_s > 0} == {3, 5, 9, 13}
    assert {step for step, block in blocks.items() if block.quiet_s > 0} >= {7, 11}


def test_a_save_that_the_disk_refused_holds_nothing_back(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller is told that it ended, and so no save is under way."""
    broken = tmp_path / "broken"
    broken.touch()
    monkeypatch.setenv("FAILING_STORE", str(broken))
    monkeypatch.setenv("PYTHONPATH", str(STORES / "failing_store"))
    monkeypatch.setattr(autotuner, "THINK_S", 0.02)
    job, ckpt = live.attach(trainings.JobSpec(steps=100), trainings.plan(memory=4, disk=4))
    told = heard(ckpt, monkeypatch)
    for step, batch in ckpt.batches(100):
        if step == 5:
            break
        trainings.train_step(job, step, batch)
        granted(ckpt)
    wait_for(told, PersistFailed)
    (failed,) = (event for event in told if isinstance(event, PersistFailed))
    assert failed.step == 4
    assert ckpt._plans.tuner is not None
    assert not ckpt._plans.tuner._controller._controller.seen.busy_saving(time.monotonic())
