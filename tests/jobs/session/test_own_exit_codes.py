"""A script that has trained to its end may tell something by its exit code."""

import json
from pathlib import Path

import pytest

from tests.unit.cli.scripts import autockpt, write

SCRIPT = """
import os, sys, torch, autockpt
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
os.makedirs("sub", exist_ok=True)
os.chdir("sub")
ckpt = autockpt.attach(model=model, optimizer=optimizer)
for step in ckpt.steps(5):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)
END
"""
CAUGHT = "try:\n    raise RuntimeError('upload')\nexcept RuntimeError:\n    sys.exit(7)"


def run(folder: Path, end: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a start."""
    write(folder, "s.py", SCRIPT.replace("END", end))
    done = autockpt("run", "--no-profile", "--run-dir", "r", "s.py", cwd=folder)
    return done.returncode, done.stdout, done.stderr


def test_an_exit_code_behind_the_training_is_passed_on(tmp_path: Path) -> None:
    """There is nothing to train again, and the work behind the loop is done once."""
    for _ in range(2):
        code, out, said = run(tmp_path, "sys.exit(7)")
        assert (code, out.count("trained")) == (7, 1), said
        assert "failed (rank 0 ended with exit code 7" in said
        assert "the training was over, so it is not started again" in said
        assert "goes on where the script ended its training" in said
        assert "restart 1" not in said
        status = json.loads((tmp_path / "r/status.json").read_text())
        assert (status["exit_code"], status["restarts"], status["last_step"]) == (7, 0, 5)
    assert f"autockpt: {tmp_path}/r holds a run that is already at step 5 of 5" in said


@pytest.mark.parametrize("end", [CAUGHT, "raise RuntimeError('upload')"], ids=["caught", "raised"])
def test_an_exception_behind_the_training_is_tried_once_more(tmp_path: Path, end: str) -> None:
    """An upload may fail by chance, also where the script makes an exit code of its failure."""
    code, out, said = run(tmp_path, end)
    assert (code, out.count("trained")) == (93, 2), said
    assert "restart 1" in said
    assert "goes on where the script ended its training" in said
