"""A bit of one replica flips in a real job of two ranks: it is found, told, and gone back from."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autockpt.run_directory import RunDirectory
from tests.jobs.kill.ordeal import read_events
from tests.jobs.kill.zygote import environment

STEPS, FLIPPED = 30, 14
PATIENCE_S = 240.0
SCRIPT = f"""
import os
import torch
import torch.distributed as dist
import autockpt

dist.init_process_group("gloo")
torch.manual_seed(0)
inner = torch.nn.BatchNorm1d(16)
plain = torch.nn.Sequential(torch.nn.Linear(8, 16), inner, torch.nn.Linear(16, 1))
model = torch.nn.parallel.DistributedDataParallel(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
ckpt = autockpt.attach(model=model, optimizer=optimizer)
for step in ckpt.steps({STEPS}):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    marker = os.environ["MARKER"]
    if step == {FLIPPED} and dist.get_rank() == 1 and not os.path.exists(marker):
        open(marker, "w").close()
        plain[0].weight.data.view(torch.int32)[3, 5] ^= 1 << 20
    ckpt.wait_durable(60.0)
total = sum(p.detach().double().abs().sum().item() for p in model.parameters())
print("digest", dist.get_rank(), total.hex(), flush=True)
"""


def run(folder: Path, wish: str, *, flips: bool = True) -> tuple[str, list[dict[str, Any]]]:
    """(output, events of the keeper) of the whole job, with a checkpoint at every boundary."""
    folder.mkdir()
    script, marker = folder / "train.py", folder / "flipped"
    script.write_text(SCRIPT)
    if not flips:
        marker.touch()
    settings = ["memory.interval=1steps", "disk.interval=1steps", "retune=false",
                f"failures.replicas={wish}"]  # fmt: skip
    sets = [word for setting in settings for word in ("--set", setting)]
    ended = subprocess.run(
        [sys.executable, "-m", "autockpt", "run", "--nproc-per-node", "2", "--no-profile",
         "--run-dir", str(folder / "run"), *sets, "--", str(script)],
        env={**environment(), "MARKER": str(marker)}, cwd=folder, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    events = read_events(folder / "run/telemetry/keeper-000.jsonl")
    return said, [event for event in events if event["event"] == "ReplicasDisagreed"]


def digests(said: str) -> set[str]:
    """What rank 0 of a job prints at its end."""
    lines = [line.split("digest ")[1] for line in said.splitlines() if "digest " in line]
    assert lines, said
    return set(lines)


@pytest.mark.slow
def test_the_training_goes_back_to_where_replicas_agreed_and_ends_as_undisturbed(
    tmp_path: Path,
) -> None:
    """To the bit, and without a flip nothing is said."""
    said, events = run(tmp_path / "quiet", "restore", flips=False)
    assert events == []
    undisturbed = digests(said)
    said, events = run(tmp_path / "flipped", "restore")
    assert events, said
    assert "failures.replicas: restore" in said
    assert digests(said) == undisturbed
    assert len(RunDirectory(tmp_path / "flipped/run").rollbacks()) == 1


@pytest.mark.slow
def test_a_flipped_bit_is_told_with_its_tensor_and_marks_the_checkpoints(tmp_path: Path) -> None:
    """The training goes on; what was saved from then on is suspect."""
    said, events = run(tmp_path / "job", "mark")
    assert events, said
    assert {event["ranks"] for event in events} == {"0, 1"}
    assert min(event["step"] for event in events) > FLIPPED
    assert "replicas disagree: ranks 0, 1 (node 0) hold different values" in said
    assert "model.0.weight" in said
    listed = subprocess.run(
        [sys.executable, "-m", "autockpt", "ls", str(tmp_path / "job/run")],
        env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert "suspect" in listed.stdout, listed.stdout
