"""Ctrl-C in `autockpt run train.py | tee log` ends tee as well: the last checkpoint is made."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from autockpt.run_directory import RunDirectory

SCRIPT = """
import time

import torch

import autockpt

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = autockpt.attach(model=model, optimizer=optimizer, data="script")
for step in ckpt.steps(100_000):
    model(torch.rand(4)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    print("step", step, flush=True)
"""


def test_a_reader_that_is_gone_costs_no_checkpoint(tmp_path: Path) -> None:
    """The script's next print would raise, before the boundary of the last checkpoint."""
    (tmp_path / "job.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "autockpt", "run", "--run-dir", "run", "--set"]
    words = [*run, "disk.interval=100000 steps", "--set", "memory.interval=100000 steps", "job.py"]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "errors", "w") as errors:
        job = subprocess.Popen(
            words, cwd=tmp_path, env=settings, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
    try:
        assert job.stdout is not None
        deadline = time.monotonic() + 120
        while b"step 60\n" not in job.stdout.readline():
            assert time.monotonic() < deadline, (tmp_path / "errors").read_text()
        os.killpg(job.pid, signal.SIGINT)
        job.stdout.close()
        assert job.wait(60) == 128 + signal.SIGINT
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    status = RunDirectory.open(tmp_path / "run").read_status()
    assert status is not None
    said = (tmp_path / "errors").read_text()
    assert (status.last_step or 0) > 60, said
    assert str(status.last_durable).endswith(f"{status.last_step:08d}"), said
