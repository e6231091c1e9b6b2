"""When a failed job is started again, and when not."""

from dataclasses import replace

import pytest

from autockpt.launch.elastic.crash_loop import (
    EXITS_WITHOUT_PROGRESS,
    KILLS_WITHOUT_PROGRESS,
    STARTUP_S,
    Attempt,
    CrashLoop,
)
from autockpt.values.generation import Generation

EXIT = Attempt(signal=0, final=False, attached=True, lasted_s=10.0, step=None, generation=None)
KILL = replace(EXIT, signal=9)


def verdicts(loop: CrashLoop, *attempts: Attempt) -> list[bool]:
    """Whether each attempt is followed by another one."""
    return [loop.verdict(attempt) is None for attempt in attempts]


@pytest.mark.parametrize(
    ("attempt", "limit"), [(EXIT, EXITS_WITHOUT_PROGRESS), (KILL, KILLS_WITHOUT_PROGRESS)]
)
def test_failures_without_progress_end(attempt: Attempt, limit: int) -> None:
    """Three exceptions in a row at the same place, or ten kills."""
    assert verdicts(CrashLoop(), *[attempt] * limit) == [True] * (limit - 1) + [False]


def test_a_newer_step_is_progress() -> None:
    """A job that gets further each time goes on for ever."""
    loop = CrashLoop()
    assert all(verdicts(loop, *(replace(EXIT, step=step) for step in range(1, 50))))


def test_the_same_step_again_is_none() -> None:
    """A poisoned batch: it always comes to step 150 and dies."""
    stuck = replace(EXIT, step=150)
    assert verdicts(CrashLoop(), *[stuck] * 4) == [True, True, True, False]


def test_an_older_step_after_a_rollback_is_none() -> None:
    """Progress is measured against the furthest attempt."""
    loop = CrashLoop(step=150)
    assert verdicts(loop, *[replace(EXIT, step=step) for step in (140, 149, 150)])[-1] is False


def test_a_newer_checkpoint_is_progress_for_kills() -> None:
    """Killed before it gets as far as last time, but a checkpoint further each time."""
    loop = CrashLoop(step=1000)
    generations = [Generation(term=term, step=1) for term in range(1, 30)]
    assert all(verdicts(loop, *(replace(KILL, generation=g) for g in generations)))


def test_a_newer_checkpoint_is_none_for_exits_at_one_step() -> None:
    """Memory runs out at step 15 each time, and each start has a checkpoint nearer to it."""
    fails = [
        replace(
            EXIT, step=15, error_step=15, generation=Generation(step=step, term=1), lasted_s=120.0
        )
        for step in (8, 10, 12, 14)
    ]
    loop = CrashLoop()
    assert [loop.verdict(one) for one in fails] == [
        None, None, None, "3 failures in a row at step 15, without any new step",
    ]  # fmt: skip
    # Five minutes: else it may be a fault of the machine that goes away.
    short = [replace(one, lasted_s=20.0) for one in fails]
    assert all(verdicts(CrashLoop(), *short))
    still = [replace(one, generation=None, lasted_s=20.0) for one in fails]
    assert verdicts(CrashLoop(), *still) == [True, True, True, False]
    elsewhere = [
        replace(one, error_step=step) for one, step in zip(fails, (15, 9, 13, 14), strict=True)
    ]
    assert all(verdicts(CrashLoop(), *elsewhere))


def test_progress_forgives_what_was_before() -> None:
    """Two failures, progress, two failures: the count began anew."""
    loop = CrashLoop()
    further = replace(EXIT, step=5)
    assert all(verdicts(loop, EXIT, EXIT, further, further, further))


def test_an_exit_that_would_repeat_itself_is_not_retried() -> None:
    """argparse, a missing import: once is enough."""
    assert "would do so again" in (CrashLoop().verdict(replace(EXIT, final=True)) or "")


def test_a_mistake_ends_the_run_also_after_progress() -> None:
    """Resumed training meets it at the same step; --max-restarts asks for another start."""
    mistake = replace(EXIT, final=True, step=500)
    assert "would do so again" in (CrashLoop().verdict(mistake) or "")
    insisting = CrashLoop(insist=True)
    assert verdicts(insisting, mistake, mistake) == [True, False]


def test_the_same_exception_at_the_same_step_is_met_once_more_only() -> None:
    """Another text or another step is another failure; what gave no text has three tries."""
    failed = replace(EXIT, step=9, error="RuntimeError: poisoned", error_step=9)
    elsewhere = replace(failed, error_step=8)
    other = replace(failed, error="RuntimeError: other")
    assert verdicts(CrashLoop(), failed, failed) == [True, False]
    assert verdicts(CrashLoop(), failed, elsewhere, other) == [True, True, True]


def test_a_script_that_never_attached_is_not_trained_from_scratch_again() -> None:
    """Hours of training would be repeated without anybody having asked; --max-restarts asks."""
    late = replace(KILL, attached=False, lasted_s=STARTUP_S + 1)
    early = replace(late, lasted_s=3.0)
    assert "--max-restarts" in (CrashLoop().verdict(late) or "")
    assert CrashLoop().verdict(early) is None
    assert CrashLoop(insist=True).verdict(late) is None


def test_a_run_that_was_taken_over_ends() -> None:
    """Two launchers of one run must not take turns."""
    assert "taken over" in (CrashLoop().verdict(replace(EXIT, replaced=True, step=9)) or "")


@pytest.mark.parametrize("insist", [False, True])
def test_a_start_that_was_refused_is_not_tried_again(insist: bool) -> None:
    """The newer steps are those of the ranks that own the directory."""
    loop = CrashLoop(step=5, insist=insist)
    refused = replace(EXIT, refused=True, final=True, step=50)
    assert "another live run" in (loop.verdict(refused) or "")


@pytest.mark.parametrize(
    ("attempt", "times"),
    [
        (EXIT, EXITS_WITHOUT_PROGRESS),
        (KILL, KILLS_WITHOUT_PROGRESS),
        (replace(EXIT, error="ValueError: x", error_step=3), 2),
        (replace(KILL, signal=11), EXITS_WITHOUT_PROGRESS),
    ],
)
def test_a_job_that_comes_no_further_is_stuck(attempt: Attempt, times: int) -> None:
    """Its scheduler is told not to requeue it; a segmentation fault counts as an exception does,
    because no kill from outside looks like one."""
    loop = CrashLoop(step=150)
    for number in range(1, times + 1):
        assert (loop.verdict(replace(attempt, step=150)) is None) is (number < times)
        assert loop.stuck is (number == times)


def test_other_ends_are_not_stuck() -> None:
    """A mistake of the script, a newer launch, a directory of others: the code says it already."""
    for attempt in (
        replace(EXIT, final=True), replace(EXIT, replaced=True), replace(EXIT, refused=True)
    ):  # fmt: skip
        loop = CrashLoop()
        assert loop.verdict(attempt) is not None
        assert not loop.stuck


def test_an_exit_behind_the_training_is_passed_on() -> None:
    """Also the first time, with the script's own code; only a person insists on another start."""
    over = replace(EXIT, final=True, over=True, error="SystemExit: 7", error_step=60, step=60)
    loop = CrashLoop(step=50)
    assert loop.verdict(over) == "the training was over, so it is not started again"
    assert not loop.stuck
    assert CrashLoop(step=50, insist=True).verdict(over) is None
