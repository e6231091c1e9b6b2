"""`keep.weights_only` in a run: older checkpoints lose optimizer state and serve as weights."""

import json
import subprocess
from pathlib import Path

import pytest

import autockpt as library
from tests.jobs.kill.ordeal import read_events
from tests.unit.cli.scripts import autockpt, write
from tests.unit.executors.storage.remote.test_remote import endpoint, s3

__all__ = ["endpoint", "s3"]

POLICY = """
version: 1
disk: {interval: 2 steps PATH}
keep: {last: 1, every: 2 steps, weights_only: true}
"""
SCRIPT = """
import os, sys, time
import torch, autockpt
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.BatchNorm1d(512))
optimizer = torch.optim.AdamW(model.parameters())
load = {"model": sys.argv[1]} if len(sys.argv) > 1 else None
ckpt = autockpt.attach(model=model, optimizer=optimizer, load=load)
print("from", ckpt.step_count, "sum", model[0].weight.double().sum().item(), flush=True)
for step in ckpt.steps(12):
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt.wait_durable(60.0)
    time.sleep(0.3)
"""


def found(cwd: Path) -> list[dict[str, object]]:
    """The checkpoints as `autockpt ls` says."""
    listed = autockpt("ls", "r", "--json", cwd=cwd)
    rows: list[dict[str, object]] = json.loads(listed.stdout)["generations"]
    return rows


def begin(cwd: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A run, to its end."""
    return autockpt("run", "--no-profile", "--policy", "policy.yaml", *arguments, cwd=cwd)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "store"])
def test_older_checkpoints_hold_weights_and_restarts_take_whole_ones(
    tmp_path: Path, s3: None, place: str
) -> None:
    """Listed, verified, loaded and fine-tuned from; a resume from one is refused."""
    stored = f"{tmp_path}/r/checkpoints" if place == "disk" else "s3://bucket/weights"
    write(tmp_path, "train.py", SCRIPT)
    path = "" if place == "disk" else f', path: "{stored}"'
    write(tmp_path, "policy.yaml", POLICY.replace(" PATH", path))
    first = begin(tmp_path, "--run-dir", "r", "train.py")
    assert first.returncode == 0, first.stderr
    again = begin(tmp_path, "--run-dir", "r", "train.py")
    assert "from 12 " in again.stdout, again.stderr
    rows = found(tmp_path)
    whole = [row for row in rows if not row["weights_only"]]
    weights = [row for row in rows if row["weights_only"]]
    assert len(weights) >= 2, rows
    assert [row["step"] for row in whole][-1] == 12
    assert len(whole) >= 2
    assert float(str(weights[0]["bytes"])) < 0.6 * float(str(whole[0]["bytes"]))
    events = read_events(tmp_path / "r" / "telemetry" / "keeper-000.jsonl")
    dropped = {e["step"]: e["bytes"] for e in events if e["event"] == "OptimizerStateDropped"}
    assert dropped.keys() >= {row["step"] for row in weights}
    assert all(dropped[row["step"]] > 0 for row in weights)
    verified = autockpt("verify", "r", "--all", cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout

    name = str(weights[0]["name"])
    refused = begin(tmp_path, "--run-dir", "r", "--resume-from", name, "train.py")
    assert refused.returncode == 78, refused.stderr
    assert f"--resume-from {name}: holds weights only" in refused.stderr
    path = f"{stored}/{name}"
    state = library.load(path)
    assert "optimizer" not in state
    assert "1.running_mean" in state["model"]
    write(tmp_path, "policy.yaml", POLICY.replace(" PATH", ""))
    tuned = begin(tmp_path, "--run-dir", "tuned", "train.py", path)
    assert tuned.returncode == 0, tuned.stderr
    expected = state["model"]["0.weight"].double().sum().item()
    assert f"from 0 sum {expected}" in tuned.stdout
