"""Without a profile the first checkpoints come early, however long a step lasts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.cli.scripts import environment, write

PATIENCE_S = 60.0
SLOW = """
import os, time
import torch, autockpt
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer)
print("trains from step", ckpt.step_count, flush=True)
for step in ckpt.steps(1000):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    with open("pids.new", "w") as file:
        file.write(f"{os.getpid()} {ckpt.keeper_pid} {step + 1}")
    os.replace("pids.new", "pids")
    time.sleep(2.0)
    if os.path.exists("enough"):
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "step_s", "lost_at", "found"),
    [(["--no-profile"], 2.0, 6, 4), ([], 5.0, 2, 1)],
    ids=["no profile", "measured while it runs"],
)
def test_a_machine_lost_in_a_slow_step_costs_little(
    tmp_path: Path, options: list[str], step_s: float, lost_at: int, found: int
) -> None:
    """Every process is killed by SIGKILL; the next start finds that step on disk."""
    write(tmp_path, "train.py", SLOW.replace("2.0", str(step_s)))
    command = [sys.executable, "-m", "autockpt", "run", *options, "--run-dir", "r", "train.py"]

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def reached(step: int) -> tuple[int, int]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if (tmp_path / "pids").exists():
                trainer, keeper, at = map(int, (tmp_path / "pids").read_text().split())
                if at >= step:
                    return trainer, keeper
            time.sleep(0.05)
        raise AssertionError(f"step {step} was not reached")

    launcher = start()
    trainer, keeper = reached(lost_at)
    for pid in (launcher.pid, trainer, keeper):
        os.kill(pid, signal.SIGKILL)
    launcher.communicate(timeout=PATIENCE_S)
    (tmp_path / "pids").unlink()
    again = start()
    reached(found + 1)
    (tmp_path / "enough").touch()
    said, _ = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, said
    assert f"trains from step {found}" in said, said
