"""A recorded controller is played again to the same answers, from any recording of it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from autockpt.session.tuning.recorder import KEPT, Recorder, recordings
from autockpt.tuner.online.controller import Controller, begin
from autockpt.tuner.online.recording import Line, RecordedController, replay
from autockpt.values.errors import ConfigError
from autockpt.values.goal import FailureDeclaration, Goal
from autockpt.values.plan import safe_default_plan
from tests.support.jobs import FakeJob
from tests.support.profiles import example_failures, example_recovery

HOUR = 3600.0


def recorded(lines: list[Line], *, full_after: int = 10**9) -> RecordedController:
    """A controller that writes into a list; "full" after so many lines each."""

    def write(line: Line) -> bool:
        lines.append(json.loads(json.dumps(line)))
        return "opening" not in line and len(lines) % full_after == 0

    memory = begin(
        plan=safe_default_plan(), failures=example_failures(), recovery=example_recovery()
    )
    goal = Goal(failures=FailureDeclaration(mtbf_s=2 * HOUR, process_share=0.8))
    return RecordedController(Controller(memory, goal=goal), write)


def a_run(own: RecordedController, *, seed: int = 4) -> FakeJob:
    """A day with noise, a failure and dearer checkpoints from noon on."""
    job = FakeJob(stall_s=1.0, noise=0.3, seed=seed)
    own.lasts(24 * HOUR)
    job.run(own, until_s=12 * HOUR)
    job.stall_s = 8.0
    own.interrupted(job.now_s, 100.0)
    job.run(own, until_s=24 * HOUR)
    return job


def split(lines: list[Line]) -> list[tuple[str, list[Line]]]:
    """Recordings, each from its opening on."""
    found: list[tuple[str, list[Line]]] = []
    for line in lines:
        if "opening" in line:
            found.append((f"r{len(found)}", []))
        found[-1][1].append(line)
    return found


def test_a_recorded_run_replays_to_the_same_decisions() -> None:
    """Every question has the same answer, and the changes of the run are among them."""
    lines: list[Line] = []
    job = a_run(recorded(lines))
    played = replay(split(lines))
    assert played.difference is None
    assert played.recordings == 1
    assert played.questions > 100
    assert list(played.proposals) == job.proposals
    assert len(job.proposals) >= 2


def test_each_recording_can_be_played_by_itself() -> None:
    """The opening holds all that decides, so that old recordings may be thrown away."""
    lines: list[Line] = []
    job = a_run(recorded(lines, full_after=500))
    parts = split(lines)
    assert len(parts) > 3
    later = [replay([part]) for part in parts]
    assert all(played.difference is None for played in later)
    assert {p for played in later for p in _names(played.proposals)} == set(_names(job.proposals))


def _names(proposals: Any) -> list[str]:
    return [proposal.reason for proposal in proposals]


def test_a_changed_input_is_found_and_named() -> None:
    """Checkpoints that cost a tenth lead elsewhere: the first other answer and its place."""
    lines: list[Line] = []
    a_run(recorded(lines))
    other = copy.deepcopy(lines)
    for line in other:
        if line.get("observed", {}).get("event") == "SnapshotSealed":
            line["observed"]["fence_stall_s"] /= 10.0
            line["observed"]["boundary_stall_s"] /= 10.0
    difference = replay([("r0", other)]).difference
    assert difference is not None
    assert difference.where.startswith("r0:")
    assert difference.recorded != difference.replayed


@pytest.mark.parametrize("first", [{"run_s": 1.0}, {}])
def test_lines_without_an_opening_are_refused(first: Line) -> None:
    """Nothing can be played from nowhere."""
    with pytest.raises(ConfigError, match="first line of a recording is its opening"):
        replay([("r0", [first])])


def test_a_line_of_another_kind_is_refused_with_its_place() -> None:
    """By recording and line."""
    lines: list[Line] = []
    recorded(lines)
    with pytest.raises(ConfigError, match="r0:2: not a line of a recording"):
        replay([("r0", [*lines, {"sung": "aloud"}])])


def test_the_disk_holds_a_bounded_number_of_recordings(tmp_path: Path) -> None:
    """The newest ones, each a little larger than its limit; a new process begins its own."""
    for _ in range(2):
        recorder = Recorder(tmp_path / "controller", recording_bytes=2000)
        for number in range(200):
            if recorder({"run_s": float(number), "pad": "x" * 500}):
                recorder({"opening": {}})
        recorder.close()
    found = recordings(tmp_path / "controller")
    assert len(found) == KEPT
    assert all(path.stat().st_size < 4000 for path in found)
    assert [int(path.stem) for path in found] == list(
        range(int(found[0].stem), int(found[0].stem) + KEPT)
    )


def test_a_folder_that_takes_nothing_silences_the_recorder(tmp_path: Path) -> None:
    """A recording is no reason to stop thinking."""
    (tmp_path / "controller").write_text("a file where the folder should be")
    recorder = Recorder(tmp_path / "controller")
    assert recorder({"run_s": 1.0}) is False
    recorder.close()
