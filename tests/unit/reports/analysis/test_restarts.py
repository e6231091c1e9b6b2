"""Parts of a restart add up to its length; what nobody told apart stays inside another part."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.reports.analysis.restarts import (
    LABELS,
    Gain,
    Restart,
    cheapest_gain,
    restarts,
    usual_iteration_s,
    with_replays,
)
from autockpt.reports.formats.renderers import report
from autockpt.reports.html.sections.restarts import restarts as restarts_section
from autockpt.reports.model import build
from autockpt.values.goal import Goal, OnOff, RestartWish
from autockpt.values.telemetry import (
    Event,
    FailureObserved,
    FirstIterationEnded,
    IterationsTimed,
    ReplayChecked,
    Restored,
    RunStarted,
)
from tests.unit.reports.examples import run_data

KNOWN = {
    "launch_s": 0.25, "interpreter_s": 0.125, "torch_import_s": 2.0, "process_group_s": 0.5,
    "script_s": 1.0, "wait_s": 0.25, "read_s": 0.5, "apply_s": 0.125,
}  # fmt: skip


def failed(at_s: float) -> FailureObserved:
    return FailureObserved(at_s=at_s, rank=-1, what="trainer", failed_rank=0, pid=1, step=9,
                           detail="")  # fmt: skip


def started(at_s: float, *, rank: int = 0, **parts: float | None) -> RunStarted:
    return RunStarted(at_s=at_s, rank=rank, wall="", run_id="r", term=2, world_size=2, pid=1,
                      plan_id="p", plan_version=1, state_bytes=1, restart_count=1,
                      **parts)  # fmt: skip


def first(at_s: float, *, rank: int = 0) -> FirstIterationEnded:
    return FirstIterationEnded(at_s=at_s, rank=rank, step=10)


def test_a_restart_is_told_part_by_part() -> None:
    """What is left of the time to the first part is the detection."""
    events: list[Event] = [
        failed(100.0), failed(100.5), started(104.5, rank=1, **KNOWN), started(105.0, **KNOWN),
        first(105.25, rank=1), first(106.0),
    ]  # fmt: skip
    (restart,) = restarts(events, 0, 40.0)
    assert (restart.failed_at_s, restart.rank, restart.total_s) == (60.0, 0, 6.0)
    assert set(restart.parts) == set(LABELS) - {"fetch", "not started"}, "one launch on one node"
    assert list(restart.parts.values()) == [0.25, *KNOWN.values(), 1.0]


def test_the_process_of_a_restart_is_shown_with_its_reason() -> None:
    """In the table, and a sentence where a survivor could not keep its own."""
    same = replace(started(105.0, **KNOWN), process="same")
    reason = "its function has left a thread"
    other = replace(started(205.0, **KNOWN), process="new", new_process_reason=reason)
    events = [failed(100.0), same, first(106.0), failed(200.0), other, first(206.0)]
    found = restarts(events, 0, 0.0)
    assert [one.process for one in found] == ["same", "new"]
    model = replace(build(run_data(ranks=2, total=3600)), restarts=found)
    page = str(restarts_section(model))
    assert "parked before" not in page
    assert "the same" in page
    assert f"Rank 0 survived, and has a new process: {reason}." in page


def test_each_restore_says_whether_its_random_numbers_came_again() -> None:
    """The worst rank decides; a comparison belongs to the restore before it."""
    model = build(run_data(ranks=2, total=9000))
    first_s, second_s = (restore.at_s for restore in model.restores)

    def check(at_s: float, rank: int, equal: bool | None, reason: str = "") -> ReplayChecked:
        return ReplayChecked(at_s=100.0 + at_s, rank=rank, step=7, equal=equal, reason=reason)

    def told(*checks: ReplayChecked) -> list[str]:
        return [restore.replay for restore in with_replays(model.restores, checks, 100.0)]

    assert told() == ["", ""]
    checks = (
        check(first_s + 1, 0, True),
        check(second_s + 1, 0, True),
        check(second_s + 2, 1, False),
    )
    differs = "no: differs from step 7 on (rank 1)"
    assert told(*checks) == ["yes: equal at step 7", differs]
    assert told(check(second_s + 1, 1, None, "no draw")) == ["", "not checked: no draw"]


def test_page_and_text_show_the_comparison_of_random_numbers() -> None:
    """In the table of restores."""
    data = run_data(ranks=2, total=9000)
    restored = next(event for event in data.events if isinstance(event, Restored))
    check = ReplayChecked(at_s=restored.at_s + 3, rank=0, step=restored.step + 1, equal=True)
    data = replace(data, events=(*data.events, check))
    for form in ("html", "text"):
        written = " ".join(report(data, format_=form).split())
        assert f"yes: equal at step {restored.step + 1}" in written
        assert "random numbers as before" in written


PART = st.none() | st.floats(0.0, 10.0)


@given(parts=st.fixed_dictionaries(dict.fromkeys(KNOWN, PART)), noticed=st.floats(0.0, 100.0))
def test_known_parts_and_the_rest_add_up(parts: dict[str, float | None], noticed: float) -> None:
    """Whichever of them are known."""
    began = 50.0 + noticed + sum(seconds or 0.0 for seconds in parts.values())
    (restart,) = restarts([failed(50.0), started(began, **parts), first(began + 1.0)], 0, 0.0)
    told = sum(seconds or 0.0 for seconds in restart.parts.values())
    assert abs(told - restart.total_s) < 1e-9 * restart.total_s + 1e-9


def test_a_start_without_a_failure_is_no_restart() -> None:
    """The first one, and the one after a clean end."""
    assert restarts([started(1.0, **KNOWN), first(2.0)], 0, 0.0) == ()


def test_a_process_that_died_on_its_way_is_counted_apart() -> None:
    """It was there, but never iterated; the next failure begins another restart."""
    events: list[Event] = [
        failed(10.0), started(15.0, **KNOWN), failed(16.0), started(21.0, **KNOWN), first(22.0),
    ]  # fmt: skip
    one, two = restarts(events, 0, 0.0)
    assert (one.total_s, one.parts["first"]) == (5.0, None)
    assert (two.total_s, two.parts["first"]) == (6.0, 1.0)


def test_page_and_text_show_the_parts() -> None:
    """A bar and a table; with plain python the dash is explained."""
    model = build(run_data(ranks=2, total=3600))
    assert len(model.restarts) == 1
    page, text = (
        report(run_data(ranks=2, total=3600), format_="html"),
        report(run_data(ranks=2, total=3600), format_="text"),
    )
    assert "Restarts by what they spent their time on" in page
    for name, label in LABELS.items():
        if name in ("fetch", "not started"):
            continue  # nothing came from another node, and it is one launch
        assert label in page
        assert (label in text) == (model.restarts[-1].parts[name] is not None)
    assert "was not told apart" in page


def whole(source: str = "memory", **parts: float | None) -> Restart:
    """A restart of these parts, seconds."""
    known = [seconds for seconds in parts.values() if seconds is not None]
    return Restart(failed_at_s=1.0, rank=0, total_s=sum(known), parts=parts, source=source)


def gain_of(
    restart: Restart, *, iteration_s: float | None = 0.1, **wish: Any
) -> tuple[float, str] | None:
    """(seconds, remedy) of a run whose usual iteration takes so long."""
    gain = cheapest_gain(restart, RestartWish(**wish), iteration_s)
    return None if gain is None else (gain.seconds, gain.remedy)


def test_the_cheapest_gain_is_a_setting_before_it_is_work() -> None:
    """A larger part that only the script can shorten comes behind it."""
    gain = gain_of(whole(detect=0.2, interpreter=0.5, torch=1.5, script=6.0, first=0.1))
    assert gain is not None
    assert gain[0] == 2.0
    assert "restart.standby" in gain[1]


def test_without_imports_the_script_is_the_next_gain() -> None:
    """As behind a parked process."""
    gain = gain_of(whole(interpreter=0.0, torch=0.0, script=2.0, first=0.1, wait=None))
    assert gain is not None
    assert (gain[0], "script" in gain[1]) == (2.0, True)


def test_a_restart_of_nothing_gains_nothing() -> None:
    """Nothing is divided by its length."""
    assert gain_of(whole()) is None
    assert gain_of(whole(script=None)) is None


def test_a_usual_iteration_is_no_gain() -> None:
    """Whatever is compiled, the training of the first iteration stays."""
    slow = whole(first=60.0, script=1.0)
    assert gain_of(slow, iteration_s=60.0, caches="off") is None
    assert gain_of(slow, iteration_s=None, caches="off") is None
    gain = gain_of(slow, iteration_s=20.0, caches="off")
    assert gain is not None
    assert (gain[0], "restart.caches: on" in gain[1]) == (40.0, True)


@pytest.mark.parametrize("wish", ["on", None])
def test_caches_are_named_only_where_they_are_off(wish: OnOff | None) -> None:
    """By itself they are on where a restart may be on another machine, and useless elsewhere."""
    gain = gain_of(whole(first=60.0), caches=wish)
    assert gain is not None
    assert (gain[0], "compiling" in gain[1], "restart." in gain[1]) == (59.9, True, False)


def test_a_parked_process_is_not_named_where_it_is_on() -> None:
    """A cold restart then has its reason told elsewhere."""
    cold = whole(interpreter=1.0, torch=4.0, script=2.0)
    assert "restart.standby" in str(gain_of(cold))
    assert "script" in str(gain_of(cold, standby="on"))


def test_reading_is_a_gain_from_storage_only() -> None:
    """From memory it is as fast as it gets."""
    assert gain_of(whole(read=9.0)) is None
    assert "memory.interval" in str(gain_of(whole("disk", read=9.0)))


def timed(count: int, total_s: float, *, rank: int = 0) -> IterationsTimed:
    return IterationsTimed(at_s=1.0, rank=rank, step=count, count=count, total_s=total_s,
                           checkpoint_s=0.0, quiet_s=0.0, busy_s=0.0)  # fmt: skip


def test_the_usual_iteration_is_the_median_of_the_witness() -> None:
    """A block with a first iteration that compiles does not count for more than its iterations."""
    events = [timed(1, 60.0), timed(10, 5.0), timed(8, 3.2), timed(500, 1000.0, rank=1)]
    assert usual_iteration_s(events, 0) == 0.5
    assert usual_iteration_s([], 0) is None


def test_the_report_names_the_gain_of_its_own_run() -> None:
    """Under the policy in force, with the source of the restore and the run's iterations."""
    back = Restored(at_s=104.0, rank=0, generation="", step=9, source="disk", bytes=1,
                    restore_s=1.0, lost_steps=0, lost_s=0.0, down_s=4.0)  # fmt: skip
    events: tuple[Event, ...] = (
        timed(9, 9.0), failed(100.0), back, started(105.0, **KNOWN), first(106.0),
    )  # fmt: skip
    auto = build(replace(run_data(ranks=1), events=events, profile=None))
    on = replace(run_data(ranks=1), events=events, profile=None,
                 goal=Goal(restart=RestartWish(standby="on")))  # fmt: skip
    assert auto.restarts[0].source == "disk"
    assert auto.next_gain == Gain(
        seconds=2.125, remedy="a parked process has these done: restart.standby: on"
    )
    gain = build(on).next_gain
    assert gain is not None
    assert gain.remedy.startswith("the script before attach()")
    assert gain.remedy in report(on, format_="html")
    assert "the script before attach()" in report(on, format_="text")
