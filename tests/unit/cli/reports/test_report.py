"""`autockpt report` with two runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autockpt.cli.app import run
from autockpt.run_directory import RunDirectory, RunInfo
from tests.unit.cli.reports.test_one_source import write
from tests.unit.reports.examples import a_profile, run_events


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one name, on storage of two hosts."""
    monkeypatch.chdir(tmp_path)
    for folder, host in (("before", "fs-1.corp"), ("after", "fs-2.corp")):
        directory = RunDirectory.create(f"{folder}/r")
        profile = a_profile()
        mark = replace(profile.fingerprint, storage=f"nfs on {host}")
        directory.write_profile(replace(profile, fingerprint=mark))
        write(directory, run_events(ranks=1, total=720))


@pytest.mark.parametrize(
    ("script", "shown"), [("/job/t.py", "t.py"), ("/other/t.py", "/other/t.py")]
)
def test_the_command_is_shown_as_it_was_typed(
    capsys: pytest.CaptureFixture[str], script: str, shown: str
) -> None:
    """Relative to the directory of the start, where the script is in it."""
    info = RunInfo(run_id="0" * 32, created="", script=script, args=("--lr", "1"), cwd="/job")
    RunDirectory("before/r").write_info(info)
    assert run(["report", "before/r", "--format", "json"]) == 0
    assert f'"autockpt run {shown} --lr 1"' in capsys.readouterr().out


def test_a_run_that_has_not_attached_yet_is_not_called_unprotected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It imports its libraries, say; one that ended without `attach` has a mark."""
    made = RunDirectory.create("r")
    made.write_info(RunInfo(run_id="0" * 32, created="", script="/job/t.py", cwd="/job"))
    for command in (["report", "r", "--format", "text"], ["explain", "r"]):
        capsys.readouterr()
        assert run(command) == 0
        said = capsys.readouterr().out
        assert "the script has not called autockpt.attach so far" in said.lower()
        assert "UNPROTECTED" not in said
    made.mark_unprotected()
    assert run(["report", "r", "--format", "text"]) == 0
    assert "UNPROTECTED" in capsys.readouterr().out


def comparison(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `--json` says of both."""
    capsys.readouterr()
    assert run(["report", "before/r", "after/r", "--json", *words]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)["comparison"]
    return said


def test_runs_of_one_name_are_called_as_they_were_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`r` and `r` would tell nobody which is the better one."""
    said = comparison(capsys)
    assert said["names"] == ["before/r", "after/r"]
    assert said["verdict"].startswith("before/r lost ")


def test_what_is_redacted_in_both_runs_differs_where_it_did(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One set of tokens for both: names of two hosts stay two."""
    said = comparison(capsys, "--redact")
    (storage,) = [row for row in said["rows"] if row["label"] == "storage"]
    hosts = {storage["first"], storage["second"]}
    assert len(hosts) == 2
    assert "corp" not in json.dumps(said)
    assert len(set(said["names"])) == 2
