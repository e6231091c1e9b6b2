"""Commands take the URL of a run's checkpoints for its run directory, or say why not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autockpt.cli.app import run as cli
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.run_directory import RunDirectory, RunInfo, control_path
from autockpt.values.failure import FailureRecord
from autockpt.values.generation import Generation
from autockpt.values.goal import Goal
from tests.support.profiles import example_profile
from tests.unit.executors.checkpoints import commit_state
from tests.unit.executors.states import trained

URL = "s3://bucket/run"
DIED = FailureRecord(
    wall="2026-01-01T00:00:00Z", kind="process", what="trainer", node=0, step=8, exposure_s=60.0
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Of a profiled run that met a failure; no store is asked."""
    monkeypatch.chdir(tmp_path)
    made = RunDirectory.create(control_path(URL))
    made.write_info(RunInfo(run_id="a" * 32, created="", script="train.py", cwd=str(tmp_path)))
    made.write_goal(Goal(storage_path=URL))
    made.write_profile(replace(example_profile(), created="2026-01-01T00:00:00Z"))
    made.append_failure(DIED)
    return made


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The object that a command prints."""
    assert cli([*words, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("url", [URL, f"{URL}/"])
def test_the_failures_of_a_run_are_found_by_its_url(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    """As by its directory, in `failures` and `plan`; such a log is read anyway, and not kept."""
    by_path = said(capsys, "failures", str(run.path))
    assert said(capsys, "failures", url) == by_path
    plan = ("plan", "--profile")
    assert said(capsys, *plan, url, "--failures", url) == said(
        capsys, *plan, str(run.path), "--failures", str(run.path)
    )
    assert cli(["failures", url, "--save"]) == 78
    assert "whose failures are read anyway" in capsys.readouterr().err
    assert not Path("s3:").exists()


@pytest.mark.parametrize("named", [(URL,), ("--profile", URL), ()])
def test_a_run_in_a_store_has_nothing_to_tune(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    named: tuple[str, ...],
) -> None:
    """It says so by URL and by directory, and writes nothing."""
    monkeypatch.setattr("autockpt.cli.shared.plan_choice.machine_mismatches", lambda *_: [])
    before = sorted(run.path.rglob("*"))
    assert cli(["tune", *(named or (str(run.path),))]) == 78
    error = capsys.readouterr().err
    assert f"{URL}: an object store is written in one way" in error
    assert "--set disk.path=DIR" in error
    assert sorted(run.path.rglob("*")) == before
    assert not Path("s3:").exists()


def test_a_drill_needs_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The policy of the run names a store; the option names the cure."""
    script = tmp_path / "train.py"
    script.write_text("")
    assert cli(["drill", "--set", f"disk.path={URL}", str(script)]) == 78
    assert "a drill needs a directory; name one: --set disk.path=DIR" in capsys.readouterr().err


def test_results_are_not_written_to_a_directory_that_looks_like_a_url(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report, a plan: the message says where they can go."""
    for words in (("report", str(run.path)), ("plan", "--profile", str(run.path))):
        assert cli([*words, "--out", "s3://bucket/result"]) == 78
        assert (
            "--out s3://bucket/result: expected a path of this machine" in capsys.readouterr().err
        )
        (Path("s3:") / "bucket").mkdir(parents=True, exist_ok=True)
    assert not (Path("s3:") / "bucket" / "result").exists()


def test_a_slash_behind_a_url_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a whole checkpoint is named; the next command names it once."""
    pytest.importorskip("obstore", reason="needs the extra remote")
    url, generation = f"file://{tmp_path}/store/run", Generation(term=1, step=1)
    directory = CheckpointDirectory(url)
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    model, optimizer = trained()
    state = LiveState({"model": model}, {"optimizer": optimizer}, {})
    commit_state(directory, run_id, generation, state, step=1)
    for words in (("ls",), ("show",), ("verify",)):
        assert cli([*words, url]) == 0
        expected = capsys.readouterr().out
        assert cli([*words, f"{url}/"]) == 0
        assert capsys.readouterr().out.replace("run//", "run/") == expected
    assert cli(["show", f"{url}/{generation.name}"]) == 0
    assert f"verify {url}/{generation.name}\n" in capsys.readouterr().err
