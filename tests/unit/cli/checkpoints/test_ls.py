"""`autockpt ls`: one damaged entry hides no other one, and is named."""

import json
from pathlib import Path

import pytest

from autockpt.cli.app import run
from autockpt.cli.shared.plan_choice import Scale, find_profile
from autockpt.launch.script import Script
from autockpt.run_directory import RunDirectory, RunInfo
from tests.unit.integrations.formats.archive.test_archive import archived, history, wide_job

DAMAGED = ["", "{", '{"run_id": 3}', "[" * 100_000, "\udcff"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of three runs."""
    for name in ("a", "b", "c"):
        made = RunDirectory.create(tmp_path / "runs" / name)
        made.write_info(RunInfo(run_id=name * 32, created="2026-01-01T00:00:00Z", script="/t.py"))
    return tmp_path / "runs"


@pytest.mark.parametrize("text", DAMAGED, ids=["empty", "cut", "other", "deep", "bytes"])
@pytest.mark.parametrize("file", ["run.json", "status.json"])
def test_a_damaged_run_is_named_and_the_others_are_listed(
    folder: Path, capsys: pytest.CaptureFixture[str], file: str, text: str
) -> None:
    """A crash of the machine leaves empty files."""
    (folder / "b" / file).write_text(text, errors="surrogateescape")
    assert run(["ls", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    rows = {row["run"]: row for row in json.loads(said.out)["runs"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "a": "unknown", "b": "damaged", "c": "unknown",
    }  # fmt: skip
    assert file in rows["b"]["damage"]
    assert not rows["a"]["damage"]
    assert "warning: b: " in said.err
    assert run(["ls", str(folder)]) == 0
    said = capsys.readouterr()
    assert "damaged" in said.out
    assert "next: autockpt report" in said.err


def test_a_folder_of_damaged_runs_alone_is_listed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No report of them is offered."""
    for name in ("a", "b", "c"):
        (folder / name / "run.json").write_text("")
    assert run(["ls", str(folder)]) == 0
    said = capsys.readouterr()
    assert said.out.count("damaged") == 3
    assert "next:" not in said.err


def test_a_damaged_member_of_an_archive_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The members that are whole stand beside it."""
    path = archived(tmp_path / "archive", history(tmp_path / "run", wide_job(), 3))
    second = sorted(path.glob("ckpt-*"))[1]
    second.write_bytes(second.read_bytes()[:20])
    assert run(["ls", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["generations"]
    assert [row["note"].startswith("damaged: ") for row in rows] == [False, True, False]
    assert run(["ls", str(path)]) == 0
    assert "damaged: " in capsys.readouterr().out


def test_a_start_names_a_damaged_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no reason to say that there is none."""
    monkeypatch.chdir(tmp_path)
    made = RunDirectory.create("runs/p")
    made.profile_path.write_text("{")
    script = Script(target="t.py", module=False, args=(), shown="t.py")
    assert "profile.json" in find_profile(script, Scale(world_size=1, nodes=1)).why_not
