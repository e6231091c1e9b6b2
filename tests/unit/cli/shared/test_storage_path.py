"""A directory in which no checkpoint can be kept is refused before anything starts."""

import os
from pathlib import Path

import pytest

from autockpt.cli.app import run
from autockpt.cli.shared import plan_choice
from autockpt.policies.default_plan import plan_without_profile
from autockpt.values.errors import ConfigError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a file, a script and no environment of ours."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("AUTOCKPT_")]:
        monkeypatch.delenv(name)
    (tmp_path / "file").write_text("x")
    (tmp_path / "job.py").write_text("raise SystemExit('was started')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("hdfs://node/run-7", "object store"), ("file/checkpoints", "is no directory"),
        ("/proc/checkpoints", "belongs to the kernel"), ("/dev/null/x", "is no directory"),
    ],
)  # fmt: skip
def test_no_command_takes_it(
    here: Path, path: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`policy check` and `run` exit with 78 and say why; nothing was made and nothing started."""
    (here / "p.yaml").write_text(f"version: 1\ndisk:\n  path: {path}\n")
    before = sorted(p.name for p in here.iterdir())
    for words in (
        ["policy", "check", "p.yaml"],
        ["run", "--no-profile", "--policy", "p.yaml", "job.py"],
        ["run", "--no-profile", "--set", f"disk.path={path}", "job.py"],
    ):
        assert run(words) == 78, words
        err = capsys.readouterr().err
        assert said in err
        assert "disk.path" in err
        assert "was started" not in err
    assert sorted(p.name for p in here.iterdir()) == before


def test_a_place_that_may_not_be_written_is_said(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named with the directory that is in the way."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"may not write {here}; name a directory"):
        plan_choice.read_goal(None, ["disk.path=new/one"], environ={})


def test_a_directory_that_is_not_there_yet_is_fine(here: Path) -> None:
    """It is made by the run, not by looking."""
    goal = plan_choice.read_goal(None, ["disk.path=new/one"], environ={})
    assert goal.storage_path == str(here / "new" / "one")
    assert not (here / "new").exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("disk.codec=delta", "disk.codec: delta reads the checkpoint before"),
        ("disk.direct=true", "disk.direct: O_DIRECT is of file systems"),
        ("staging.path=direct", "staging.path: writes to a disk"),
        ("archive.codec=none", "archive.codec: an archive is made of checkpoints in a directory"),
        ("remote.url=s3://bucket/copies", "remote.url: copies the checkpoints of a directory"),
    ],
)
def test_what_a_store_does_not_offer_is_refused_at_once(
    here: Path, setting: str, said: str
) -> None:
    """With one sentence; nothing was asked of the store."""
    url = "disk.path=s3://bucket/run"
    with pytest.raises(ConfigError, match=said):
        plan_choice.read_goal(None, [url, setting], environ={})
    goal = plan_choice.read_goal(None, [url], environ={})
    assert goal.is_in_store
    assert not plan_without_profile(goal).staging.direct_io
