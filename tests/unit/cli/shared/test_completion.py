"""What a tab offers: presets, policy keys, runs, checkpoints, strategies, decisions, files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from autockpt.cli import app
from autockpt.cli.app import COMPLETE, cli, run
from autockpt.run_directory import RunDirectory, RunInfo

FIRST, SECOND = "ckpt-t0001-step-00000400", "ckpt-t0002-step-00000100"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs, the newer of which has two checkpoints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(COMPLETE, "bash_complete")
    for number, name in enumerate(("old", "new")):
        made = RunDirectory.create(f"runs/{name}")
        made.write_info(RunInfo(run_id="0" * 32, created="", script="t.py"))
        os.utime(made.path / "run.json", (number, number))
    for name in (FIRST, SECOND, "terms"):
        os.makedirs(f"runs/new/checkpoints/{name}")
    return tmp_path


def offered(*words: str) -> list[str]:
    """Words that are offered for the last one; `<file>` where the shell offers files, too."""
    found = ShellComplete(cli, {}, "autockpt", COMPLETE).get_completions(
        list(words[:-1]), words[-1]
    )
    return ["<file>" if each.type == "file" else each.value for each in found]


def test_policies_are_presets_and_files() -> None:
    """Each preset with its description."""
    assert offered("run", "--policy", "builtin:aut") == ["builtin:auto", "<file>"]
    found = ShellComplete(cli, {}, "autockpt", COMPLETE).get_completions(["plan", "--policy"], "b")
    assert all(each.help for each in found if each.type != "file")
    assert offered("policy", "check", "builtin:aut") == ["builtin:auto", "<file>"]
    assert "gemini" in offered("simulate", "--strategy", "gem")


def test_settings_are_keys_of_a_policy() -> None:
    """With the sign behind which the value stands; `policy explain` takes them without."""
    assert offered("run", "--set", "disk.wri") == ["disk.writers="]
    assert offered("policy", "explain", "builtin:auto", "disk.wri") == ["disk.writers"]


def test_runs_are_offered_newest_first() -> None:
    """Where a run is wanted; a script is a file."""
    assert offered("report", "") == ["runs/new", "runs/old", "<file>"]
    assert offered("verify", "runs/o") == ["runs/old", "<file>"]
    assert offered("run", "--run-dir", "runs/n") == ["runs/new", "<file>"]
    assert offered("run", "tra") == ["<file>"]


def test_checkpoints_of_the_named_run_are_offered_newest_first() -> None:
    """As an argument and as the value of an option."""
    assert offered("verify", "runs/new", "") == [SECOND, FIRST]
    assert offered("convert", "runs/new", "out", "--generation", "ckpt-t0001") == [FIRST]
    assert offered("run", "--run-dir", "runs/new", "--resume-from", "") == [SECOND, FIRST]
    assert offered("verify", "runs/none", "") == [], "no traceback on a tab"


def test_the_script_of_bash_completes_words_with_colons(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """readline splits `builtin:auto` in three words, and `--policy=builtin:auto` in five."""
    if not Path("/bin/bash").exists():
        pytest.skip("no bash")
    monkeypatch.delenv(COMPLETE)
    assert run(["completion", "bash"]) == 0
    (here / "c.sh").write_text(capsys.readouterr().out)
    (here / "autockpt").write_text(f'#!/bin/sh\nexec {sys.executable} -m autockpt "$@"\n')
    (here / "autockpt").chmod(0o755)
    ask = """
source ./c.sh
COMP_WORDS=(autockpt run --policy builtin : aut); COMP_CWORD=5
_autockpt_completion ./autockpt; echo "${COMPREPLY[@]}"
COMP_WORDS=(autockpt run --set = disk.wri); COMP_CWORD=4
_autockpt_completion ./autockpt; echo "${COMPREPLY[@]}"
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(app.__file__).parents[2])}
    done = subprocess.run(
        ["/bin/bash", "-c", ask], cwd=here, env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["auto", "disk.writers="], done.stderr


def test_a_tab_does_not_load_torch(here: Path) -> None:
    """It would take seconds."""
    environment = {**os.environ, "COMP_WORDS": "autockpt run --set disk.w", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "autockpt"], cwd=here, env=environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "disk.writers=" in done.stdout, done.stderr[-2000:]
    assert " torch\n" not in done.stderr
