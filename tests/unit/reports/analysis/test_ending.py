"""A report of a run that did not finish opens with how it ended, what was lost, and why."""

import dataclasses
from typing import Any

import pytest

from autockpt.reports.analysis.accounting import account
from autockpt.reports.analysis.clock import align
from autockpt.reports.analysis.ending import ending
from autockpt.reports.analysis.saves import ages
from autockpt.reports.data import RunData
from autockpt.reports.formats import text
from autockpt.reports.formats.json_out import read, render
from autockpt.reports.html import html
from autockpt.reports.model import build
from autockpt.values.telemetry import (
    CheckpointDurable,
    Degraded,
    Event,
    FailureObserved,
    IterationsTimed,
    MemoryCommitted,
    RemoteCopied,
    Restored,
    RunEnded,
    RunStarted,
    TrainerFailed,
)


def started(at_s: float, *, rank: int = 0, restart: int = 0) -> RunStarted:
    """A rank attached."""
    return RunStarted(
        at_s=at_s, rank=rank, wall="", run_id="r", term=restart + 1, world_size=1, pid=1,
        plan_id="p", plan_version=1, state_bytes=1, restart_count=restart,
    )  # fmt: skip


def block(at_s: float, step: int, count: int) -> IterationsTimed:
    """Iterations of half a second each."""
    return IterationsTimed(
        at_s=at_s, rank=0, step=step, count=count, total_s=count / 2, checkpoint_s=0.0,
        quiet_s=0.5, busy_s=0.0,
    )  # fmt: skip


def ended(at_s: float, step: int, reason: str) -> RunEnded:
    """The trainer's own last word."""
    return RunEnded(at_s=at_s, rank=0, step=step, reason=reason)


def durable(at_s: float, step: int) -> CheckpointDurable:
    """A checkpoint on disk."""
    return CheckpointDurable(
        at_s=at_s, rank=-1, generation=f"step {step} (term 1)", step=step, bytes=1, stored_bytes=1,
        latency_s=0.1, write_s=0.1,
    )  # fmt: skip


def raised(at_s: float, step: int, error: str, *, rank: int = 0, origin: str = "mistake") -> Event:
    """The script's exception."""
    return TrainerFailed(at_s=at_s, rank=rank, step=step, error=error, origin=origin)


def lost(at_s: float, step: int) -> FailureObserved:
    """What the keeper sees of a death."""
    return FailureObserved(
        at_s=at_s, rank=-1, what="trainer", failed_rank=0, pid=1, step=step, detail=""
    )


def restored(at_s: float, step: int, *, lost_steps: int = 0) -> Restored:
    """The keeper's word of a resume; it knows of no loss where nobody died before it."""
    return Restored(
        at_s=at_s, rank=0, generation="e1", step=step, source="disk", bytes=1, restore_s=0.1,
        lost_steps=lost_steps, lost_s=lost_steps / 2, down_s=0.0,
    )  # fmt: skip


def data(*events: Event, **status: Any) -> RunData:
    """A run with these events, and a launcher's status where one is given."""
    return RunData(
        title="train", command="autockpt run t.py", resume="autockpt run --run-dir runs/t t.py",
        events=events, status=status,
    )  # fmt: skip


FAILED = {
    "state": "failed", "exit_code": 1, "restarts": 2,
    "reason": "rank 0 ended (ValueError: typo): no more",
}  # fmt: skip


def test_a_failed_run_opens_with_the_exception_and_what_was_lost() -> None:
    """On the page, on the terminal and in the JSON; the rest comes after it."""
    run = data(started(0), block(26, 52, 52), raised(26.1, 52, "ValueError: typo"), **FAILED)
    model = build(run)
    said = model.verdict
    assert said.headline == "Failed at step 52: ValueError: typo."
    assert said.lost == "No checkpoint is durable: all 52 steps are lost (26 s of training)."
    assert said.next_step == (
        "Correct the error. Then start the same run again: it begins at step 0, because nothing "
        "is durable."
    )
    assert said.command == "autockpt run --run-dir runs/t t.py"
    assert said.detail.startswith("Exit code 1; 2 restarts; rank 0 ended: no more.")
    assert said.tone == "bad"
    assert model.accounting is not None
    assert (model.accounting.productive_s, model.accounting.lost_s) == (0.0, pytest.approx(26.0))
    assert said.cost.startswith("Of 26.1 s, 0 us (0 %) went into training that counts;")
    assert (model.facts[0].label, model.facts[0].value) == ("Ended", "failed, exit code 1")
    tile = next(tile for tile in model.tiles if tile.label == "Worst loss")
    assert (tile.value, tile.note) == ("26 s", "52 steps, failed at the end")
    assert read(render(model)).ending == model.ending
    assert "=> Failed at step 52: ValueError: typo." in text.render(model)
    assert model.timeline is not None
    assert "rank 0 failed at step 52: ValueError: typo" in {m.text for m in model.timeline.marks}
    page = html.render(model)
    assert page.index("ValueError: typo") < page.index("went into training")


def test_only_what_is_in_no_durable_checkpoint_is_lost() -> None:
    """Of the last stretch of training."""
    run = data(started(0), block(24, 48, 48), durable(24.5, 48), block(79, 159, 111),
               ended(80, 159, "signal"), state="interrupted", exit_code=143)  # fmt: skip
    said = build(run).verdict
    assert said.headline == "Interrupted at step 159."
    assert said.lost.startswith(
        "111 steps are lost (55.5 s of training): the newest durable checkpoint is of step 48."
    )
    assert said.next_step == "Start the same run again: it resumes at step 48."
    assert said.tone == "bad"
    saved = data(*run.events[:-1], durable(79.9, 159), run.events[-1], **run.status)
    said = build(saved).verdict
    assert "Nothing was lost at the end: the checkpoint of step 159 is durable." in said.lost
    assert said.tone == "warn"


def test_a_run_that_never_trained_says_so() -> None:
    """A script with a NameError in its first line leaves no telemetry at all."""
    run = dataclasses.replace(
        data(state="failed", exit_code=1, restarts=0, reason="rank 0 ended with exit code 1",
             error="NameError: name 'x' is not defined"),
        protected=False,
    )  # fmt: skip
    model = build(run)
    assert model.verdict.headline == (
        "Failed before the first step was reported: NameError: name 'x' is not defined."
    )
    assert model.verdict.lost == "Nothing had been trained."
    assert model.verdict.tone == "bad"
    assert model.verdict.next_step == (
        "Correct the error. Then start the same run again: it begins at step 0, because nothing "
        "is durable."
    )
    assert model.verdict.command == run.resume
    assert model.findings[0].evidence == "the script ended before it called autockpt.attach"
    for shown in (text.render(model), html.render(model)):
        assert "UNPROTECTED" not in shown
        assert "autockpt run printed" not in shown


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (91, "is refused again, until the script goes on where its state is."),
        (78, "is refused again, until what is named above is corrected."),
        (66, "is refused again; autockpt verify --quarantine, or --fresh."),
        (73, "goes on when the other run has ended."),
    ],
)
def test_a_command_that_would_be_refused_again_is_not_said_to_resume(code: int, said: str) -> None:
    """Though a checkpoint is durable: the terminal says the same."""
    run = data(started(0), block(24, 48, 48), durable(24.5, 48), **{**FAILED, "exit_code": code})
    verdict = build(run).verdict
    assert verdict.next_step == f"The same command {said}"
    assert verdict.command == run.resume


def test_a_copy_in_the_object_store_is_resumed() -> None:
    """Also where none on disk is known of."""
    copied = RemoteCopied(
        at_s=24.6, rank=-1, generation="step 40 (term 1)", step=40, bytes=1, latency_s=0.1,
        copy_s=0.1,
    )  # fmt: skip
    said = build(data(started(0), block(24, 48, 48), copied, **FAILED)).verdict
    assert said.next_step.endswith("it resumes at step 40.")
    assert said.lost.startswith("8 steps are lost")


def test_a_command_with_a_hidden_key_says_so_and_keeps_its_line() -> None:
    """A training with the literal would fail late, and a broken line starts something else."""
    command = f"autockpt run --run-dir runs/t t.py --api-key '[secret]' {'--option=1 ' * 9}".strip()
    run = dataclasses.replace(data(started(0), block(26, 52, 52), **FAILED), resume=command)
    said = build(run).verdict
    assert said.next_step.endswith("nothing is durable. Put your own value for [secret].")
    assert f"     $ {command}" in text.render(build(run)).splitlines()
    plain = build(dataclasses.replace(run, resume="autockpt run t.py")).verdict
    assert "[secret]" not in plain.next_step


def test_a_run_without_a_word_of_its_end_runs_or_is_silent() -> None:
    """The age of its status tells the two apart; nothing is called lost."""
    run = dataclasses.replace(data(started(0), block(5, 10, 10), state="running"), silent_s=5.0)
    assert build(run).verdict.headline == "Still running at step 10."
    silent = build(dataclasses.replace(run, silent_s=7200.0)).verdict.headline
    assert silent == "No end was told: it may still run. The last word at step 10 is 2 h ago."


def test_a_silent_run_is_to_be_started_again_and_a_live_one_to_be_mended() -> None:
    """Only a run that writes its status needs nothing."""
    live = dataclasses.replace(data(started(0), block(5, 10, 10), state="running"), silent_s=5.0)
    said = build(live).verdict
    assert (said.next_step, said.command) == ("Nothing, while it runs.", "")
    for silent_s in (7200.0, None):
        said = build(dataclasses.replace(live, silent_s=silent_s)).verdict
        assert said.next_step == "If it no longer runs, start it again."
        assert said.command == live.resume
    skipped = Degraded(at_s=6, rank=-1, what="peers", reason="no node answers")
    model = build(dataclasses.replace(live, events=(*live.events, skipped)))
    worst = model.findings[0]
    assert worst.id == "degraded"
    assert model.verdict.next_step == f"{worst.title}: {worst.fix}."


def test_a_finished_run_says_so_and_that_nothing_was_lost() -> None:
    """Its end is the headline and one fact of the head."""
    run = data(started(0), block(5, 10, 10), durable(5.1, 10), ended(5.2, 10, "finished"),
               state="finished", exit_code=0, restarts=0)  # fmt: skip
    model = build(run)
    assert model.verdict.headline == "Finished at step 10."
    assert model.verdict.lost.startswith("Nothing: no failure.")
    assert model.facts[0].value == "finished, exit code 0"


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([block(5, 10, 10)], None),
        ([block(5, 10, 10), ended(6, 10, "finished")], "finished"),
        ([block(5, 10, 10), ended(6, 10, "signal")], "interrupted"),
        ([block(5, 10, 10), raised(6, 10, "ValueError")], "failed"),
        ([block(5, 10, 10), lost(6, 10)], "failed"),
        ([block(5, 10, 10), lost(6, 10), started(7), block(9, 12, 2)], None),
    ],
)
def test_without_a_launcher_of_ours_the_last_words_count(
    events: list[Event], state: str | None
) -> None:
    """Under torchrun or a plain python nobody writes a status."""
    found = ending(align([started(0), *events]), {})
    assert (found and found.state) == state


def test_the_first_exception_of_the_script_is_named() -> None:
    """The other ranks only saw their peer vanish, and may say so earlier."""
    events = [
        started(0), raised(1, 1, "ValueError: old"), started(2),
        raised(8, 9, "RuntimeError: Connection closed by peer", rank=1, origin="machine"),
        raised(8.1, 9, "KeyError: 'batch'", rank=2),
    ]  # fmt: skip
    found = ending(align(events), FAILED)
    assert found is not None
    assert found.error == "KeyError: 'batch'"


def test_steps_that_a_signal_threw_away_are_lost_steps() -> None:
    """52 steps, told to leave, nothing kept, 70 from scratch: no failure was seen, all the same
    52 of 122 iterations do not count."""
    events = [
        started(0), block(26, 52, 52), ended(26.1, 52, "signal"),
        started(40, restart=0), block(75, 70, 70), durable(75.1, 70), ended(75.2, 70, "finished"),
    ]  # fmt: skip
    accounting, restores = account(align(events))
    assert accounting.steps == 122
    assert accounting.lost_s == pytest.approx(26.0)
    assert accounting.productive_s == pytest.approx(35.0)
    assert [(r.lost_steps, r.source, r.failed_at_s) for r in restores] == [(52, "", None)]
    model = build(data(*events, state="finished", exit_code=0, restarts=0))
    assert "no failure" not in model.verdict.lost
    assert "52 steps (26 s) were trained before an end and not kept" in model.verdict.lost
    assert next(t for t in model.tiles if t.label == "Worst loss").value == "26 s"


def test_a_resume_behind_the_end_has_lost_what_lies_between() -> None:
    """Told to leave at 159, resumed at 48: the keeper saw no death and reports no loss."""
    events = [
        started(0), block(79.5, 159, 159), ended(80, 159, "signal"),
        started(90), restored(90.1, 48), block(116, 100, 52),
    ]  # fmt: skip
    accounting, restores = account(align(events))
    assert [r.lost_steps for r in restores] == [111]
    assert accounting.lost_s == pytest.approx(55.5)


def test_each_restart_that_failed_again_is_one_failure() -> None:
    """Killed, back, killed before a block of iterations ended, back."""
    events = [
        started(0), block(5, 10, 10), lost(6, 10), started(10), restored(10.1, 8, lost_steps=2),
        lost(12, 9), started(16), restored(16.1, 8, lost_steps=1), block(22, 20, 12),
    ]  # fmt: skip
    _, restores = account(align(events))
    assert [r.lost_steps for r in restores] == [2, 1]


def test_work_before_the_first_checkpoint_is_at_stake() -> None:
    """20 s until a first checkpoint of memory are the largest age, not the 9 ms after it."""
    first = MemoryCommitted(
        at_s=20.009, rank=-1, generation="step 40 (term 1)", step=40, latency_s=0.009
    )
    events = align([started(0), block(20, 40, 40), first, block(20.01, 41, 1)])
    (memory,) = ages(events)
    assert memory.worst_s == pytest.approx(20.009)


def launched(at_s: float, restart: int, run_id: str = "r") -> RunStarted:
    """A rank attached ten seconds after its launcher had decided to start it."""
    return dataclasses.replace(
        started(at_s, restart=restart), launch_s=4.0, script_s=6.0, run_id=run_id
    )


END = (block(105, 10, 10), durable(105.1, 10), ended(105.2, 10, "finished"))


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([launched(100, 0)], "Nothing: no failure."),
        ([launched(100, 1)], "One failure cost 10 s in all."),
        ([launched(100, 3)], "3 failures cost 10 s in all."),
        ([lost(89, 0), launched(100, 1)], "One failure cost 11 s in all."),
        ([lost(80, 0), lost(85, 0), launched(100, 3)], "3 failures cost 20 s in all."),
        ([launched(50, 0), block(55, 9, 9), ended(55.2, 9, "finished"), launched(100, 1)],
         "One failure"),
        ([launched(50, 0), block(55, 9, 9), ended(55.2, 9, "signal"), launched(100, 1)],
         "One failure"),
    ],
)  # fmt: skip
def test_a_death_that_no_keeper_saw_is_told_by_the_restart(events: list[Event], said: str) -> None:
    """Before it attached, or as it ended well: the launcher started something anew."""
    model = build(data(*events, *END, state="finished", exit_code=0, restarts=1))
    assert said in model.verdict.lost
    assert model.accounting is not None
    assert all(seconds >= -1e-9 for seconds in model.accounting.parts().values())


def test_a_job_that_slurm_queued_again_after_its_end_has_not_died() -> None:
    """It was told to leave, and said so; without that word it died."""
    first, again = launched(50, 0, "slurm-7.0"), launched(100, 1, "slurm-7.0")
    left = [first, block(55, 9, 9), ended(55.2, 9, "signal"), again]
    assert "failure cost" not in build(data(*left, *END)).verdict.lost
    died = [first, block(55, 9, 9), again]
    assert "One failure" in build(data(*died, *END)).verdict.lost
