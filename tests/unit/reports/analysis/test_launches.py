"""One directory, started again by hand after the script failed: each quantity has one value."""

from dataclasses import replace

from autockpt.reports.data import RunData
from autockpt.reports.formats.renderers import report
from autockpt.reports.model import ReportModel, build
from autockpt.values.telemetry import (
    Event,
    FailureObserved,
    FirstIterationEnded,
    IterationsTimed,
    PlanChanged,
    Restored,
    RunStarted,
    TrainerFailed,
)
from autockpt.values.units import format_duration
from tests.unit.reports.examples import a_decision

NOT_STARTED_S = 90.0
STARTUP_S = 5.0


def launch(at_s: float, run_id: str, step: int, *, at_step: int = 12) -> list[Event]:
    """A process that starts behind `step` and raises; its keeper sees that."""
    count = at_step - step
    end_s = at_s + 0.25 * count
    return [
        RunStarted(at_s=at_s, rank=0, wall="", run_id=run_id, term=1, world_size=1, pid=1,
                   plan_id="p", plan_version=0, state_bytes=1, restart_count=0,
                   torch_import_s=STARTUP_S),
        FirstIterationEnded(at_s=at_s + 0.25, rank=0, step=step + 1),
        IterationsTimed(at_s=end_s, rank=0, step=at_step, count=count, total_s=0.25 * count,
                        checkpoint_s=0.0, quiet_s=0.25, busy_s=0.0),
        TrainerFailed(at_s=end_s + 0.01, rank=0, step=at_step, error="ValueError: x",
                      origin="mistake"),
        FailureObserved(at_s=end_s + 0.1, rank=-1, what="trainer", failed_rank=0, pid=1,
                        step=at_step, detail="its connection closed"),
    ]  # fmt: skip


def started_twice() -> RunData:
    """The keeper of the second launch tells the end of the first one too."""
    first = launch(100.0, "one", 0)
    ended_s = first[-1].at_s
    again_s = ended_s + NOT_STARTED_S + STARTUP_S
    found = FailureObserved(at_s=first[-2].at_s + 1e-6, rank=-1, what="keeper+trainer",
                            failed_rank=-1, pid=0, step=12,
                            detail="found by the next keeper")  # fmt: skip
    back = Restored(at_s=again_s + 0.001, rank=0, generation="step 8 (term 1)", step=8,
                    source="disk", bytes=1, restore_s=0.02, lost_steps=4, lost_s=5.99,
                    down_s=again_s - ended_s + 0.09)  # fmt: skip
    return RunData(
        title="t", events=(*first, found, back, *launch(again_s, "two", 8)),
        status={"state": "failed", "exit_code": 1},
    )  # fmt: skip


def built() -> ReportModel:
    return build(started_twice())


def test_lost_work_has_one_value() -> None:
    """The keeper knew a pace of one slow iteration: no more can be lost than was trained."""
    model = built()
    assert model.accounting is not None
    assert model.ending is not None
    (restore,) = model.restores
    assert (restore.lost_steps, restore.lost_s) == (4, 1.0)
    assert model.ending.lost_s == 1.0
    assert model.accounting.lost_s == restore.lost_s + model.ending.lost_s
    assert f"4 steps ({format_duration(1.0)}) trained again" in model.losses
    assert f"lost work {format_duration(2.0)} (" in model.verdict.cost


def test_the_time_until_somebody_starts_again_is_no_down_time() -> None:
    """It is not wall time either, and no part of a restart makes it shorter."""
    model = built()
    (restore,), accounting = model.restores, model.accounting
    assert accounting is not None
    assert STARTUP_S <= restore.down_s < STARTUP_S + 0.2
    assert accounting.down_s == restore.down_s
    assert abs(accounting.paused_s - NOT_STARTED_S) < 1e-6
    assert accounting.other_s >= -1e-6
    (restart,) = model.restarts
    assert restart.parts["detect"] == 0.0
    assert abs((restart.parts["not started"] or 0.0) - NOT_STARTED_S) < 1e-6
    assert abs(sum(s or 0.0 for s in restart.parts.values()) - restart.total_s) < 1e-6
    page = report(started_twice(), format_="text")
    assert "SIGTERM" not in page
    assert "restart.standby" not in page, "a parked process ends with its launcher"


def test_a_promise_is_compared_with_the_same_time() -> None:
    """A plan that began within the first launch: its events tell of the second one only."""
    data, decision = started_twice(), a_decision()
    changed = PlanChanged(
        at_s=100.5, rank=0, plan_version=decision.plan.version, step=2, memory_interval_steps=4,
        disk_interval_steps=4, reason="measured",
    )  # fmt: skip
    model = build(replace(data, decision=decision, events=(*data.events, changed)))
    (restore,) = model.restores
    seen = {promise.name: promise.observed for promise in model.promises}
    recovery_s = seen["recovery_disk_s"]
    assert recovery_s is not None
    assert abs(recovery_s - restore.lost_s - restore.down_s) < 1e-6
    assert model.timeline is not None
    began_s, ended_s = model.timeline.rows[0].spans["down"]
    assert abs(ended_s - began_s - restore.down_s) < 1e-6


def test_one_end_is_one_failure() -> None:
    """Seen by its keeper, and found by the next one; the last end is told by itself."""
    model = built()
    (restore,) = model.restores
    assert (restore.deaths, restore.what) == (1, "trainer")
    assert "One failure of all starts cost" in model.losses
    restores = next(tile for tile in model.tiles if tile.label == "Restores")
    assert restores.value == "1"
