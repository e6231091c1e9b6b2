"""Seconds by purpose add up to the wall time, and each purpose gets what happened."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.reports.analysis.accounting import account
from autockpt.reports.analysis.clock import align
from autockpt.reports.analysis.saves import ages, saves
from autockpt.reports.verdict import losses
from autockpt.values.generation import SCRATCH
from autockpt.values.telemetry import (
    EVENTS,
    CheckpointDurable,
    Event,
    FailureObserved,
    IterationsTimed,
    RemoteCopied,
    Restored,
    RunEnded,
    RunStarted,
)
from tests.unit.reports.examples import failure_records, run_events

SECONDS = st.floats(0.0, 1e6, allow_nan=False)


def started(at_s: float, *, rank: int = 0, restart: int = 0, wall: str = "") -> RunStarted:
    return RunStarted(at_s=at_s, rank=rank, wall=wall, run_id="r", term=restart + 1, world_size=1,
                      pid=1, plan_id="p", plan_version=1, state_bytes=1,
                      restart_count=restart)  # fmt: skip


def block(at_s: float, step: int, count: int, total_s: float, **more: float) -> IterationsTimed:
    values = {"checkpoint_s": 0.0, "quiet_s": 0.0, "busy_s": 0.0, **more}
    return IterationsTimed(at_s=at_s, rank=0, step=step, count=count, total_s=total_s, **values)


def failed(at_s: float, step: int) -> FailureObserved:
    return FailureObserved(at_s=at_s, rank=-1, what="trainer", failed_rank=0, pid=1, step=step,
                           detail="")  # fmt: skip


def restored(at_s: float, step: int, lost_steps: int, lost_s: float, down_s: float) -> Restored:
    return Restored(at_s=at_s, rank=0, generation="g", step=step, source="memory", bytes=1,
                    restore_s=1.0, lost_steps=lost_steps, lost_s=lost_s,
                    down_s=down_s)  # fmt: skip


@pytest.mark.parametrize("dies", [False, True], ids=["left", "died"])
def test_a_start_that_discards_the_training_has_lost_nothing(dies: bool) -> None:
    """`--fresh` leaves 300 steps behind; without it the same events are a loss."""
    end: list[Event] = [failed(31.0, 300)] if dies else []
    fresh = replace(started(40.0, restart=1), discards=True)
    events = [started(0.0), block(30.0, 300, 300, 30.0), *end, fresh, block(50.0, 100, 100, 10.0)]
    result, restores = account(events)
    assert sum(restore.lost_steps for restore in restores) == 0
    assert result.lost_s == 0.0
    assert "not kept" not in losses(restores, (), nothing=True)
    kept, lost = account([replace(e, discards=False) if e is fresh else e for e in events])
    assert sum(restore.lost_steps for restore in lost) == 300
    assert kept.lost_s == pytest.approx(30.0)


def rollback(*, discards: bool, dies: bool = False) -> list[Event]:
    """300 iterations, of which the next launch goes on behind the first 100."""
    left = RunEnded(at_s=60.0, rank=0, step=300, reason="signal")
    resumed = "step 100 (term 1)"
    return [
        started(0.0),
        block(30.0, 150, 150, 27.0, checkpoint_s=3.0, quiet_s=0.16, busy_s=0.2),
        block(60.0, 300, 150, 30.0, quiet_s=0.2),
        failed(60.0, 300) if dies else left,
        replace(started(100.0), run_id="again", resumed=resumed, discards=discards),
        restored(100.1, 100, 200 if dies and not discards else 0, 0.0, 0.0),
        block(130.1, 200, 100, 30.0),
    ]


@pytest.mark.parametrize("dies", [False, True], ids=["left", "died"])
def test_iterations_left_by_a_rollback_are_neither_productive_nor_lost(dies: bool) -> None:
    """`--resume-from` leaves 200 of 300: with their stalls they are no wall time either."""
    result, _ = account(align(rollback(discards=True, dies=dies)))
    assert result.left_s == pytest.approx(9.0 + 1.0 + 30.0)
    assert result.productive_s == pytest.approx(100 * 0.16 + 30.0)
    assert (result.slowdown_s, result.stall_s) == (pytest.approx(2.0), pytest.approx(2.0))
    assert (result.steps, result.lost_s) == (200, 0.0)
    assert result.wall_s == pytest.approx(sum(result.parts().values()))
    assert 0.0 <= result.other_s < 0.2
    kept, _ = account(align(rollback(discards=False, dies=dies)))
    assert (kept.left_s, kept.steps) == (0.0, 400)
    assert kept.lost_s > 30.0
    assert kept.goodput < 0.6 < 0.9 < result.goodput


def any_event(kind: type[Event]) -> st.SearchStrategy[Event]:
    """An event of one kind with arbitrary fields of the right types."""
    words = ["memory", "disk", "finished", "signal", "error", "", "2026-01-01", "step 4 (term 1)"]
    by_type = {
        float: SECONDS,
        int: st.integers(-1, 10**6),
        float | None: st.none() | SECONDS,
        bool: st.booleans(),
        bool | None: st.none() | st.booleans(),
        tuple[float, ...]: st.lists(SECONDS, max_size=3).map(tuple),
        str: st.sampled_from([*words, SCRATCH]),
    }
    hints = {name: by_type[hint] for name, hint in _hints(kind).items()}
    return st.builds(kind, **hints)


def _hints(kind: type[Event]) -> dict[str, type]:
    import typing

    return typing.get_type_hints(kind)


@given(st.lists(st.one_of([any_event(kind) for kind in EVENTS.values()]), max_size=30))
@settings(max_examples=200, deadline=None)
def test_parts_add_up_to_the_wall_time_for_any_telemetry(events: list[Event]) -> None:
    """The identity holds to 1e-9 whatever the events claim."""
    result, _ = account(align(events))

    total = math.fsum(result.parts().values())
    assert total == pytest.approx(result.wall_s, rel=1e-9, abs=1e-9 * 1e7)
    assert all(seconds >= 0 for name, seconds in result.parts().items() if name != "other")


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Event], dict[str, float]]:
    """A consistent run of one rank, and the true seconds by purpose."""
    length = st.floats(0.01, 50.0)
    truth = dict.fromkeys(("productive", "stall", "slowdown", "lost", "down", "other"), 0.0)
    now, step = draw(st.floats(0, 1e4)), 0
    events: list[Event] = [started(now)]
    startup = draw(length)
    now, truth["other"] = now + startup, startup
    for restart in range(draw(st.integers(0, 3)) + 1):
        trained, since = 0.0, step
        for _ in range(draw(st.integers(1, 4))):
            count, quiet = draw(st.integers(1, 20)), draw(length)
            slowed, stall = draw(st.floats(0.0, 5.0)), draw(st.floats(0.0, 5.0))
            now += count * quiet + slowed + stall
            step += count
            trained += count * quiet
            busy = quiet + slowed / count if slowed else 0.0
            events.append(block(now, step, count, count * quiet + slowed, checkpoint_s=stall,
                                quiet_s=quiet, busy_s=busy))  # fmt: skip
            truth["slowdown"] += slowed
            truth["stall"] += stall
        truth["productive"] += trained
        if restart < 3 and draw(st.booleans()):
            down, share = draw(st.floats(1.0, 60.0)), draw(st.floats(0.01, 1.0))
            events.append(failed(now, step))
            events.append(started(now + down - 0.5, restart=restart + 1))
            now += down
            events.append(restored(now, since, step - since, share * trained, down))
            truth["productive"] -= share * trained
            truth["lost"] += share * trained
            truth["down"] += down
            step = since
    events.append(RunEnded(at_s=now, rank=0, step=step, reason="finished"))
    return events, truth


@given(histories())
@settings(max_examples=150, deadline=None)
def test_a_consistent_run_is_accounted_exactly(
    history: tuple[list[Event], dict[str, float]],
) -> None:
    """Every purpose gets its true seconds, and `other` is never negative."""
    events, truth = history

    result, _ = account(align(events))

    assert result.other_s >= -1e-6
    for name, seconds in result.parts().items():
        assert seconds == pytest.approx(truth[name], rel=1e-6, abs=1e-5), name


def test_the_example_run_loses_what_its_failures_took() -> None:
    """Lost work and down time are those of the two restores, once and not once per rank."""
    result, restores = account(align(run_events()), failure_records())

    assert [r.source for r in restores] == ["memory", "disk"]
    assert result.lost_s == pytest.approx(sum(r.lost_s for r in restores))
    assert result.down_s == pytest.approx(44.2 + 71.0)
    assert result.detect_s == pytest.approx(10.5)
    assert result.restore_s == pytest.approx(17.9)
    assert 20.0 < result.other_s < 23.0


def test_iterations_after_the_last_block_are_trained_time() -> None:
    """A block cut short by a failure is not `other`: its iterations ran."""
    events = [started(0.0), block(10.0, 10, 10, 10.0), failed(15.5, 15), started(20.0, restart=1),
              restored(22.0, 12, 3, 3.0, 6.5), block(32.0, 22, 10, 10.0)]  # fmt: skip

    result, _ = account(align(events))

    assert result.productive_s == pytest.approx(10.0 + 5.0 - 3.0 + 10.0)
    assert result.lost_s == pytest.approx(3.0)
    assert result.other_s == pytest.approx(0.5)


def test_a_job_that_starts_from_scratch_lost_everything() -> None:
    """No Restored after a failure: all training before it was in vain."""
    events = [started(0.0), block(10.0, 10, 10, 10.0), failed(10.0, 10), started(15.0, restart=1),
              block(25.0, 10, 10, 10.0)]  # fmt: skip

    result, (restore,) = account(align(events))

    assert result.lost_s == pytest.approx(10.0)
    assert result.down_s == pytest.approx(5.0)
    assert restore.source == ""
    assert restore.lost_steps == 10


def test_a_pause_between_runs_is_not_wall_time() -> None:
    """Told to leave at night, started in the morning: nobody lost the night."""
    events = [started(0.0), block(10.0, 10, 10, 10.0),
              RunEnded(at_s=10.0, rank=0, step=10, reason="signal"), started(5010.0),
              block(5020.0, 20, 10, 10.0)]  # fmt: skip

    result, _ = account(align(events))

    assert result.paused_s == pytest.approx(5000.0)
    assert result.wall_s == pytest.approx(20.0)
    assert result.goodput == pytest.approx(1.0)


def test_events_of_another_boot_are_moved_onto_one_clock() -> None:
    """After a reboot the monotonic clock starts again; UTC tells how far apart the two are."""
    events = [started(9000.0, wall="2026-11-21T04:00:00+00:00"), block(9010.0, 10, 10, 10.0),
              started(50.0, restart=1, wall="2026-11-21T04:01:00+00:00"),
              block(60.0, 20, 10, 10.0)]  # fmt: skip

    aligned = align(events)

    assert [e.at_s for e in aligned] == [9000.0, 9010.0, 9060.0, 9070.0]


def test_small_differences_of_the_wall_clock_do_not_move_events() -> None:
    """Within one boot the monotonic clock is the better witness."""
    events = [started(10.0, wall="2026-11-21T04:00:00+00:00"),
              started(11.0, rank=1, wall="2026-11-21T04:00:03+00:00")]  # fmt: skip

    assert align(events) == tuple(events)


def test_no_events_are_no_time() -> None:
    """An empty run divides by nothing."""
    result, restores = account(())

    assert (result.wall_s, result.goodput, result.waste, restores) == (0.0, 0.0, 0.0, ())


def test_a_generation_counts_once_and_its_stall_is_that_of_the_slowest_rank() -> None:
    """Eight ranks report a checkpoint; it is one checkpoint."""
    events = align(run_events(total=720))

    counted = saves(events)

    assert counted.sealed == counted.memory_committed == 10
    assert counted.disk_committed == 2
    assert counted.stall is not None
    assert counted.stall.n == 10
    assert counted.copy is not None
    assert counted.copy.p50_s == pytest.approx(0.67)


def test_age_is_largest_just_before_the_next_commit() -> None:
    """State becomes old until the next one is durable, its latency included."""
    events: list[Event] = [started(0.0)]
    for at_s in (10.0, 20.0, 40.0):
        events.append(block(at_s, int(at_s), 10, 10.0))
        events.append(CheckpointDurable(at_s=at_s + 3.0, rank=-1, generation=f"g{at_s}",
                                       step=int(at_s), bytes=1, stored_bytes=1, latency_s=3.0,
                                       write_s=2.0))  # fmt: skip
    events.append(block(41.0, 41, 1, 1.0))

    (age,) = ages(align(events))

    assert age.tier == "disk"
    assert (age.step, age.age_steps) == (40, 1)
    assert age.worst_s == pytest.approx(23.0)
    assert age.age_s == pytest.approx(1.0)


def test_a_copy_that_is_made_behind_the_training_is_of_no_older_work() -> None:
    """As by `autockpt push` the next day; nor does the night between two launches count."""
    copied = RemoteCopied(
        at_s=9010.0, rank=-1, generation="g20", step=20, bytes=1, latency_s=8990.0, copy_s=1.0
    )
    ended = RunEnded(at_s=20.0, rank=0, step=20, reason="finished")
    events: list[Event] = [started(0.0), block(20.0, 20, 20, 20.0), ended, copied]
    (age,) = ages(align(events))
    assert (age.tier, age.worst_s) == ("object store", 20.0)
    again = [replace(started(9000.0), run_id="again"), block(9030.0, 50, 30, 30.0)]
    late = replace(copied, at_s=9031.0, generation="g50", step=50, latency_s=1.0)
    (age,) = ages(align([*events[:-1], *again, late]))
    assert age.worst_s == pytest.approx(31.0)


def test_a_failure_before_the_first_iteration_is_no_restore() -> None:
    """The start before it is not one that came back from it."""
    began, ended = started(1.0), failed(2.0, step=0)
    accounting, restores = account([began, ended])
    assert (accounting.steps, restores) == (0, ())
    _, (back,) = account([began, ended, started(4.0, restart=1), restored(5.0, 0, 0, 0.0, 3.0)])
    assert (back.failed_at_s, back.deaths) == (1.0, 1)
