"""`autockpt tune`: measures, decides, writes a policy that runs take, and says what it did."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autockpt.cli.app import run
from autockpt.cli.jobs import profile as profile_command
from autockpt.cli.jobs import tune_text
from autockpt.cli.jobs.tune import BUDGET
from autockpt.cli.shared import plan_choice
from autockpt.cli.shared.prospects import search_of
from autockpt.console import Console
from autockpt.policies.policy_file import load_policy
from autockpt.run_directory import RunDirectory
from autockpt.tuner.search.outcome import outcome_of
from autockpt.tuner.search.record import header_line, trial_line
from autockpt.tuner.search.space import MIB, candidate_of
from autockpt.values.profile import Profile
from tests.support.profiles import example_profile, example_state
from tests.unit.cli.scripts import python
from tests.unit.cli.test_start_up import HEAVY, MEASURE
from tests.unit.tuner.search.machines import (
    Machine,
    carried_out,
    changed,
    model,
    record_of,
    search_for,
)

SMALL = example_state(24 * MIB)
QUICK = ("--budget", "10")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in a directory of its own, on the machine of the example profile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_choice, "machine_mismatches", lambda measured, scale: [])
    return tmp_path


def profiled(profile: Profile | None = None) -> str:
    RunDirectory.create("runs/p").write_profile(profile or example_profile(state=SMALL))
    return "runs/p"


def recorded(path: Path, *, best_writers: int = 4) -> Path:
    """The record of a search on a made-up machine."""
    found = model()
    machine = Machine(changed(found.space.default, writers=best_writers))
    record = record_of(carried_out(search_for(found), machine))
    path.write_text(header_line(record.header) + "".join(map(trial_line, record.trials)))
    return path


def failed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert run(argv) != 0
    return capsys.readouterr().err


def test_a_search_writes_its_samples_its_study_and_a_policy(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real writes; every one is told, in the file and in the table; nothing else is left."""
    assert run(("tune", profiled(), *QUICK, "--out", "found")) == 0
    shown = capsys.readouterr()
    assert "10 of 10  final" in shown.err
    assert "synthetic numbers" in shown.out
    assert sorted(p.name for p in Path("found").iterdir()) == [
        "study.journal",
        "trials.jsonl",
        "tuned.yaml",
    ]
    assert len(Path("found/trials.jsonl").read_text().splitlines()) == 11
    assert not Path("runs/p/checkpoints").exists()
    marked = [line for line in shown.out.splitlines() if re.search(r"chosen", line)]
    assert marked
    assert "predicted" in shown.out
    assert "autockpt run --profile runs/p --policy found/tuned.yaml SCRIPT" in shown.err


def test_a_replay_says_what_the_search_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The same object but for the files, from trials.jsonl alone."""
    assert run(("tune", "--profile", profiled(), *QUICK, "--out", "found", "--json")) == 0
    live: dict[str, Any] = json.loads(capsys.readouterr().out)
    Path("alone").mkdir()
    Path("found/trials.jsonl").rename("alone/trials.jsonl")
    Path("runs/p/profile.json").unlink()
    assert run(("tune", "--replay", "alone/trials.jsonl", "--json")) == 0
    again = json.loads(capsys.readouterr().out)
    assert (live["command"], live.pop("files").keys()) == (
        "tune",
        {"tuned.yaml", "trials.jsonl", "study.journal"},
    )
    assert again.pop("files") == {}
    assert again == live


def test_the_policy_of_a_winner_is_followed(here: Path) -> None:
    """`decide` under the fragment plans the very way that won, on top of what it extends."""
    found = model(codec="none")
    best = changed(found.space.default, writers=8, chunk_bytes=4 * MIB, direct_io=False)
    outcome = outcome_of(carried_out(search_for(found), Machine(best)))
    assert not outcome.verdict.kept_default
    Path("mine.yaml").write_text("version: 1\nkeep: {last: 7}\ndisk: {codec: none}\n")
    Path("tuned").mkdir()
    Path("tuned/tuned.yaml").write_text(tune_text.policy_fragment(outcome, extends="../mine.yaml"))
    goal = load_policy("tuned/tuned.yaml").goal
    assert goal.retention.keep_last == 7
    plan = plan_choice.decide(found.space.profile, goal).plan
    assert candidate_of(plan) == outcome.verdict.winner
    assert run(("policy", "check", "tuned/tuned.yaml")) == 0


def test_a_default_that_is_not_beaten_pins_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The fragment is the policy as it was, and says so."""
    found = model()
    outcome = outcome_of(carried_out(search_for(found), Machine(found.space.default)))
    assert outcome.verdict.kept_default
    text = tune_text.policy_fragment(outcome, extends="builtin:auto")
    assert "Nothing is pinned" in text
    Path("tuned.yaml").write_text(text)
    assert load_policy("tuned.yaml").goal.pins == load_policy("builtin:auto").goal.pins


def test_a_record_of_another_machine_is_replayed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replaying measures nothing, so it needs no profile and no storage."""
    assert run(("tune", "--replay", str(recorded(here / "trials.jsonl")))) == 0
    text = capsys.readouterr().out
    assert text.startswith("chosen: 4 writers")
    assert "interleaved rounds" in text
    assert re.search(r"^ +2 writers x 8 MiB direct none .* default$", text, re.M)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("tune",), "nothing is named to tune"),
        (("tune", "runs/p", "--profile", "runs/p"), "nothing is named to tune"),
        (("tune", "nowhere"), "no profile"),
        (("tune", "runs/p", "--budget", "3"), "at least 10"),
        (("tune", "runs/p", "--time", "0 s"), "--time"),
        (("tune", "runs/p", "--set", "limits.stall=1 us"), "limits.stall is 1 us"),
        (("tune", "runs/p", "--set", "limits.lost_time=10 ms"), "nearest: limits.lost_time"),
        (("tune", "runs/p", "--out", "/proc/nowhere"), "/proc/nowhere: cannot be written"),
        (("tune", "--replay", "none.jsonl"), "none.jsonl: cannot be read"),
        (("tune", "runs/p", "--replay", "none.jsonl"), "drop the other input"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_measured(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to do, and without a file left behind."""
    profiled()
    error = failed(capsys, *argv)
    assert message in error
    assert "final" not in error
    assert [p.name for p in Path("runs/p").iterdir() if p.name.startswith("tune-")] == []


def test_all_knobs_pinned_names_the_pins(capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to search, and the error says what would help."""
    pins = ("disk.writers=2", "disk.chunk=8 MiB", "disk.direct=true", "disk.codec=none")
    argv = [word for pin in pins for word in ("--set", pin)]
    error = failed(capsys, "tune", profiled(), *argv)
    assert "nothing to tune" in error
    assert "nearest: without" in error


def test_a_profile_of_another_machine_is_stale(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is fast there says nothing here."""
    monkeypatch.undo()
    place = profiled()
    assert run(("tune", place, *QUICK)) == 65
    assert "autockpt profile SCRIPT" in capsys.readouterr().err


def test_a_profile_of_nonsense_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Zero bandwidth divides nothing by zero."""
    link = example_profile().links[0]
    place = profiled(example_profile(state=SMALL, links=(replace(link, bytes_per_s=0.0),)))
    assert "bandwidth of link host_copy is 0" in failed(capsys, "tune", place)


def test_a_profile_can_be_tuned_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """`autockpt profile --tune`: the same search, and the words for the next run."""
    directory = RunDirectory.open(profiled())
    found = profile_command._tune(Console(), directory, None, ("disk.codec=none",))
    assert found is not None
    header, outcome, files = found
    assert (header.goal.pins.codec, header.budget) == ("none", BUDGET)
    assert all(Path(path).is_file() for path in files.values())
    words = tune_text.policy_words(*found)
    tuned = ["--policy", files["tuned.yaml"]]
    assert words == ([] if outcome.verdict.kept_default else tuned)
    assert re.search(rf"4[0-9] of {BUDGET}", capsys.readouterr().err)  # whole rounds of a final


def test_the_report_of_a_tuned_profile_shows_the_search(here: Path) -> None:
    """The newest one that can be read; one of another version is as if it were not there."""
    place = Path(profiled())
    run_directory = RunDirectory.open(place)
    assert search_of(run_directory) is None
    (place / "tune-20260101-000000").mkdir()
    recorded(place / "tune-20260101-000000" / "trials.jsonl")
    found = search_of(run_directory)
    assert found is not None
    assert found.winner == found.ways[0].way == str(changed(model().space.default, writers=4))
    assert found.ways[0].note == "chosen"
    assert sum(w.stage == "final" for w in found.writes) >= 8
    assert sum(found.importances.values()) == pytest.approx(1.0)
    (place / "tune-20260102-000000").mkdir()
    (place / "tune-20260102-000000" / "trials.jsonl").write_text('{"schema_version": 99}\n')
    again = search_of(run_directory)
    assert again is not None
    assert (again.writes, again.others) == (found.writes, 1)


def test_a_profile_that_cannot_be_tuned_stays_a_profile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A state too small to tell ways apart is a warning there, not an error."""
    tiny = RunDirectory.open(profiled(example_profile(state=example_state(200_000))))
    assert profile_command._tune(Console(), tiny, None, ()) is None
    assert "warning: not tuned: nothing to tune" in capsys.readouterr().err


def test_help_needs_neither_torch_nor_optuna(tmp_path: Path) -> None:
    """They are loaded when something is measured."""
    (tmp_path / "measure.py").write_text(MEASURE)
    done = python("measure.py", "tune", "--help", cwd=tmp_path)
    found = json.loads(done.stderr.splitlines()[-1])
    assert found["code"] == 0
    assert not set(HEAVY) & set(found["modules"])


def test_an_unknown_schema_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file that a later version wrote."""
    path = recorded(here / "trials.jsonl")
    path.write_text(path.read_text().replace('"schema_version":1', '"schema_version":9', 1))
    error = failed(capsys, "tune", "--replay", str(path))
    assert "schema_version 9, this autockpt reads 1" in error
