"""`autockpt explain`: one decision or all, what would turn them, and whether they replay."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.cli.app import run
from autockpt.cli.shared import plan_choice
from autockpt.run_directory import RunDirectory
from autockpt.session.tuning.recorder import Recorder
from autockpt.tuner.online.controller import Controller, begin
from autockpt.tuner.online.proposals import intervals_of
from autockpt.tuner.online.recording import RecordedController
from autockpt.values.goal import FailureDeclaration, Goal
from autockpt.values.telemetry import Event, RunStarted, event_data
from tests.support.jobs import FakeJob
from tests.support.profiles import example_failures, example_profile, example_recovery

HOUR = 3600.0
GOAL = Goal(failures=FailureDeclaration(mtbf_s=2 * HOUR, process_share=0.8))


@pytest.fixture
def tuned(tmp_path: Path) -> RunDirectory:
    """A run of half a day whose checkpoints cost more than its profile says: it was re-tuned."""
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_goal(GOAL)
    directory.write_profile(example_profile())
    decision = plan_choice.decide(example_profile(), GOAL)
    memory = begin(plan=decision.plan, failures=example_failures(), recovery=example_recovery())
    recorder = Recorder(directory.controller)
    own = RecordedController(Controller(memory, goal=GOAL), recorder)
    job = FakeJob(stall_s=8.0, noise=0.1, seed=2)
    job.run(own, until_s=12 * HOUR)
    recorder.close()
    plan_choice.write(directory, replace(decision, plan=own.plan))
    started = RunStarted(
        at_s=0.0, rank=0, wall="", run_id="r", term=1, world_size=1, pid=1, plan_id="p",
        plan_version=1, state_bytes=1, restart_count=0,
    )  # fmt: skip
    write_events(directory, [started, *job.log])
    assert intervals_of(own.plan) != intervals_of(decision.plan)
    return directory


def write_events(directory: RunDirectory, events: list[Event]) -> None:
    """As the ranks do."""
    lines = [json.dumps(event_data(event)) + "\n" for event in events]
    directory.rank_telemetry(0).write_text("".join(lines))


def text_of(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """What a command prints on stdout."""
    assert run(argv) == code
    return capsys.readouterr().out


def test_every_change_is_told_with_the_plan_before_as_runner_up(
    tuned: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the staging with what would turn it, and the promises with a warning where they part."""
    text = text_of(capsys, "explain", str(tuned.path))
    assert "v2  from step" in text
    assert "runner-up: as before (lost time" in text
    assert "turned by stall: 21 times: blocking" in text
    assert "promised against observed" in text
    assert "warning: stall per checkpoint: " in text


def test_one_decision_comes_with_its_numbers(
    tuned: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """A choice by its name, a change by its version; an unknown name lists the known ones."""
    change = text_of(capsys, "explain", str(tuned.path), "v2")
    assert "waste_before = " in change
    assert "staging" not in change
    staging = text_of(capsys, "explain", str(tuned.path), "staging")
    assert "v2" not in staging
    assert run(["explain", str(tuned.path), "stagging"]) == 78
    assert "there are: memory.interval, disk.interval, staging" in capsys.readouterr().err


def test_everything_is_one_object_with_json(
    tuned: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Choices with their flips, changes with their proposals, promises, warnings."""
    body = json.loads(text_of(capsys, "explain", str(tuned.path), "--json"))
    staging = next(c for c in body["choices"] if c["choice"]["name"] == "staging")
    assert {flip["input"] for flip in staging["flips"]} == {"stall", "interference"}
    assert body["changes"][0]["proposal"]["expected"]["waste"] > 0
    assert body["decision"]["plan"]["version"] == 1 + len(body["changes"])
    assert body["warnings"]


def test_a_recording_that_was_changed_does_not_replay(
    tuned: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 with the same decisions, 1 with the first difference named."""
    assert "the same decisions" in text_of(capsys, "explain", str(tuned.path), "--replay")
    (path,) = tuned.controller.iterdir()
    path.write_text(path.read_text().replace('"iteration_s":1.0', '"iteration_s":1.1'))
    text = text_of(capsys, "explain", str(tuned.path), "--replay", code=1)
    assert "differs at controller/000001.jsonl:" in text


def test_a_run_without_recordings_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what writes them."""
    directory = RunDirectory.create(tmp_path / "bare")
    assert run(["explain", str(directory.path), "--replay"]) == 78
    assert "no recording of the controller" in capsys.readouterr().err
