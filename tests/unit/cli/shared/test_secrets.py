"""Keys that a script is given stand in no file of its run."""

from pathlib import Path

import pytest

from autockpt.cli.jobs.preparation import prepare
from autockpt.cli.shared import plan_choice
from autockpt.cli.shared.plan_choice import Scale, find_profile
from autockpt.launch.script import Script
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import Goal
from tests.support.profiles import example_profile
from tests.unit.cli.scripts import autockpt, write

SOURCE = """
import os, sys
import torch
import autockpt
assert os.environ["WANDB_API_KEY"] == "canary-of-the-environment"
assert sys.argv[1:] == ["--api-key", "canary-1", "--password=canary-2", "s3://me:canary-3@host/b"]
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = autockpt.attach(model=model, optimizer=optimizer)
for step in ckpt.steps(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
GIVEN = ("--api-key", "canary-1", "--password=canary-2", "s3://me:canary-3@host/b")


def test_no_file_of_a_run_holds_a_key(tmp_path: Path) -> None:
    """Of the command line or the environment: run.json, telemetry, logs, checkpoints, report."""
    write(tmp_path, "s.py", SOURCE)
    done = autockpt(
        "run", "--run-dir", "r", "s.py", *GIVEN, cwd=tmp_path,
        WANDB_API_KEY="canary-of-the-environment",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "r").rglob("*") if path.is_file()]
    assert {"run.json", "report.html", "COMMIT"} <= {path.name for path in files}
    assert [str(path) for path in files if b"canary" in path.read_bytes()] == []
    assert "--api-key" in (tmp_path / "r" / "report.html").read_text()


def test_a_profile_is_found_again_by_a_command_with_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the other arguments: another key is the same job, another size is not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_choice, "machine_mismatches", lambda *_: ())
    scale = Scale(world_size=1, nodes=1)

    def script(*args: str) -> Script:
        return Script(target="/s.py", module=False, args=args, shown="s.py")

    run = RunDirectory.create("runs/a")
    prepare(run, script("--token", "one", "--size", "8"), "profile", Goal(), scale)
    run.write_profile(example_profile())
    assert find_profile(script("--token", "two", "--size", "8"), scale).profile is not None
    other = find_profile(script("--token", "one", "--size", "9"), scale)
    assert other.profile is None
    assert other.why_not == "no profile fits (runs/a: --size 9 (there: 8))"
