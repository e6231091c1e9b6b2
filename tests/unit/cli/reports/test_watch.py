"""`autockpt watch`: what is trained, saved, protected and at risk; it ends with the run."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.cli.app import run
from autockpt.cli.reports import watch
from autockpt.cli.reports.watch_text import LiveView, lines
from autockpt.run_directory import RunDirectory
from autockpt.values.failure import FailureRecord
from autockpt.values.status import DegradedTier, RunStatus
from autockpt.values.telemetry import (
    CheckpointDurable,
    Event,
    IterationsTimed,
    MemoryCommitted,
    PlanChanged,
    event_data,
)

RUNNING = RunStatus(
    state="running", exit_code=None, restarts=0, last_step=420,
    last_durable="ckpt-t0001-step-00000300", protected=True, report=None,
)  # fmt: skip
EVENTS: tuple[Event, ...] = (
    IterationsTimed(
        at_s=9.0, rank=0, step=420, count=100, total_s=50.0, checkpoint_s=0.0, quiet_s=0.5,
        busy_s=0.0,
    ),
    CheckpointDurable(
        at_s=5.0, rank=-1, generation="ckpt-t0001-step-00000300", step=300, bytes=1,
        stored_bytes=1, latency_s=1.0, write_s=1.0,
    ),
    MemoryCommitted(
        at_s=7.0, rank=-1, generation="ckpt-t0001-step-00000400", step=400, latency_s=1.0
    ),
    PlanChanged(
        at_s=8.0, rank=0, plan_version=2, step=410, memory_interval_steps=100,
        disk_interval_steps=300, reason="a checkpoint costs more than it did; " * 4,
    ),
)  # fmt: skip
FAILURE = FailureRecord(
    wall="2026-01-01T00:00:00Z", kind="process", what="trainer", node=0, step=350,
    exposure_s=10.0, source="memory",
)  # fmt: skip
VIEW = LiveView(
    title="train-1", status=RUNNING, status_age_s=1.0, events=EVENTS, failures=(FAILURE,)
)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run that trains."""
    found = RunDirectory.create(tmp_path / "train-1")
    found.write_status(RUNNING)
    found.rank_telemetry(0).write_text(
        "".join(json.dumps(event_data(event)) + "\n" for event in EVENTS)
    )
    found.append_failure(FAILURE)
    return found


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    """And each fact is there."""
    shown = lines(VIEW, width)
    assert max(map(len, shown)) <= width
    text = " ".join(" ".join(shown).split())
    assert "step 420, 500 ms each" in text
    assert "disk step 300, memory step 400" in text
    assert "20 steps, 10 s of training" in text
    assert "restarts 1" in text
    assert "plan 2 from step 410" in text
    assert "restart: trainer lost at step 350, back from memory" in text


def test_a_degraded_tier_is_shown_with_its_error() -> None:
    """`protected` says NO and why."""
    tier = DegradedTier(tier="disk", since="", because="No space left", doing="")
    status = replace(RUNNING, protected=False, degraded=(tier,))
    text = "\n".join(lines(replace(VIEW, status=status), 80))
    assert "NO; disk: No space left" in text


def test_an_old_status_says_that_the_keeper_is_silent() -> None:
    """`running` in a file that is older than a minute is not believed."""
    old = replace(VIEW, status_age_s=600.0)
    assert "no word for 10 min" in lines(old, 80)[0]
    assert old.has_ended
    assert not VIEW.has_ended


def test_without_a_terminal_it_prints_once(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain text, without control characters."""
    assert run(["watch", str(directory.path)]) == 0
    out = capsys.readouterr().out
    assert "step 420" in out
    assert "\x1b" not in out


def test_it_ends_with_the_run(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal it draws until the status says that the run has ended."""
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            directory.write_status(replace(RUNNING, state="finished", exit_code=0, last_step=600))

    monkeypatch.setattr(watch.time, "sleep", sleep)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run(["watch", str(directory.path), "--every", "7"]) == 0
    out = capsys.readouterr().out
    assert looks == [7.0] * 3
    assert out.count(watch.REDRAW) == 4
    assert "finished" in out.rpartition(watch.REDRAW)[2]


def test_a_run_without_a_status_is_starting(tmp_path: Path) -> None:
    """Nothing is missing that could be there."""
    view = LiveView(title="r", status=None, status_age_s=0.0, events=(), failures=())
    assert lines(view, 40)[0] == "r  starting"
    assert not view.has_ended


def test_metrics_are_those_of_the_status(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """`autockpt metrics RUN` needs no telemetry."""
    assert run(["metrics", str(directory.path)]) == 0
    out = capsys.readouterr().out
    assert 'autockpt_last_step{run="train-1"} 420' in out
    assert 'autockpt_durable_step{run="train-1"} 300' in out
    assert 'autockpt_at_risk_steps{run="train-1"} 120' in out


def test_the_time_of_a_status_is_the_one_of_its_file(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dead keeper is seen by the age of its last word."""
    os.utime(directory.path / "status.json", (time.time(), 1000.0))
    assert run(["metrics", str(directory.path)]) == 0
    assert 'autockpt_status_timestamp_seconds{run="train-1"} 1000.0' in capsys.readouterr().out


def test_metrics_need_a_run_or_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """Either, and not both."""
    assert run(["metrics"]) == 2
    assert "Give RUN_DIR, or --mixin DIR." in capsys.readouterr().err
