"""Scripts that `python` runs alone: policy keys in the environment, and the end of the process."""

import os
import subprocess
import sys
from pathlib import Path

from autockpt.executors.storage.catalogue import committed_names
from tests.conftest import end_keeper
from tests.jobs.kill.zygote import environment

SCRIPT = """
import time, torch, autockpt
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = autockpt.attach(model=model, optimizer=optimizer)
for step in ckpt.steps(31):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""


def test_a_script_that_attaches_alone_follows_the_environment(tmp_path: Path) -> None:
    """Interval and place of the disk tier."""
    (tmp_path / "train.py").write_text(SCRIPT)
    told = {"AUTOCKPT_DISK_INTERVAL": "5 steps", "AUTOCKPT_DISK_PATH": str(tmp_path / "there")}
    try:
        subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path, env={**environment(), **told}, check=True,
            timeout=120,
        )  # fmt: skip
    finally:
        end_keeper(os.fspath(tmp_path / "runs" / "train"))
    steps = [int(name[-8:]) for name in committed_names(str(tmp_path / "there"))]
    assert any(step % 5 == 0 for step in steps), steps


SHORT = """
import threading
import torch, autockpt
from autockpt.executors.linux import late_threads

late_threads.is_needed = True
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = autockpt.attach(model=model, optimizer=optimizer, data="script")
for step in range(ckpt.step_count, 1):
    model(torch.ones(4)).sum().backward()
    optimizer.step()

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

threading.Thread.start = refuse
"""
"""From its last line on Python starts no thread, as 3.12 does."""


def test_a_script_shorter_than_its_first_checkpoint_has_a_last_one(tmp_path: Path) -> None:
    """Where all that it needs begins behind the last line."""
    (tmp_path / "train.py").write_text(SHORT)
    try:
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path, env=environment(), check=True, text=True,
            capture_output=True, timeout=120,
        )  # fmt: skip
    finally:
        end_keeper(os.fspath(tmp_path / "runs" / "train"))
    names = committed_names(str(tmp_path / "runs" / "train" / "checkpoints"))
    assert [int(name[-8:]) for name in names] == [1], done.stderr
