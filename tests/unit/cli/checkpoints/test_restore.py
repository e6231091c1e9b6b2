"""`autockpt restore --dry-run`: the plan of a real script, printed; nothing is restored."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autockpt.cli import app
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import commit_state

SCRIPT = """
import sys, torch, autockpt
model = torch.nn.Sequential(torch.nn.Linear(8, int(sys.argv[1])), torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
autockpt.attach(model=model, optimizer=optimizer, data="script")
raise SystemExit("attach came back")
"""


def saved(folder: Path) -> tuple[str, str]:
    """(directory of a checkpoint, script whose argument is the width of its model)."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.zero_grad()
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    directory = CheckpointDirectory(str(folder / "checkpoints"))
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    state = LiveState.of(model=model, optimizer=optimizer)
    commit_state(directory, run_id, Generation(term=1, step=1), state)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return str(folder / "checkpoints"), str(script)


@pytest.mark.parametrize(("width", "code", "fits"), [("4", 0, "yes"), ("5", 78, "no")])
def test_the_plan_of_a_script_is_printed_and_says_whether_it_fits(
    tmp_path: Path, width: str, code: int, fits: str
) -> None:
    """The script ends in attach; which file gives how much; what is missing, with its name."""
    checkpoints, script = saved(tmp_path)
    before = sorted(os.listdir(checkpoints))
    argv = ["-m", "autockpt", "restore", "--dry-run", "--json", checkpoints, script, width]
    done = subprocess.run(
        [sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["fits"], plan["step"]) == (fits, 1)
    assert plan["shards"][0]["file"].startswith("shard-00000")
    how = {row["name"]: row["how"] for row in plan["contents"]}
    assert how["model.1.weight"] == "as it was saved"
    assert (how["model.0.weight"] == "missing") == (fits == "no")
    assert any("model.0.weight: is (5, 8)" in said for said in plan["refusals"]) == (fits == "no")
    assert sorted(os.listdir(checkpoints)) == before
    assert not (tmp_path / "runs").exists()


def test_without_dry_run_it_says_how_a_restore_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No script is started."""
    assert app.run(["restore", str(tmp_path), "train.py"]) == 2
    assert "`autockpt run` resumes a run; add --dry-run" in capsys.readouterr().err
