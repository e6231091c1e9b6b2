"""Each learning rate of a sweep under `autockpt run` trains its own model, and finds it again.

A script starts the same training with one value after the other.  All processes inherit the
directory of the run; only the first may have it.
"""

import os
import re
import subprocess
from pathlib import Path

TRAIN = """
import sys
import torch
import autockpt

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
ckpt = autockpt.attach(model=model, optimizer=optimizer)
begun = ckpt.step_count
for step in ckpt.steps(6):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()
print("lr", sys.argv[1], "from", begun, "sum", model.weight.sum().item(), flush=True)
"""
SWEEP = """
import subprocess, sys
for lr in sys.argv[1:]:
    subprocess.run([sys.executable, "train.py", lr], check=True)
"""
COMMAND = ("autockpt", "run", "--no-profile", "--run-dir", "r", "sweep.py", "0.01", "0.1")


def trained(*command: str) -> "tuple[list[tuple[str, int, float]], str]":
    """Learning rate, first step and weights of each training, and what autockpt said."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "AUTOCKPT_RUN_DIR": os.path.abspath("r")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^lr (\S+) from (\d+) sum (\S+)$", done.stdout, re.MULTILINE)
    return [(lr, int(begun), float(weights)) for lr, begun, weights in lines], done.stderr


Path("train.py").write_text(TRAIN)
Path("sweep.py").write_text(SWEEP)
found, said = trained(*COMMAND)
assert [run[:2] for run in found] == [("0.01", 0), ("0.1", 0)], f"expected two trainings: {found}"
assert found[0][2] != found[1][2], f"expected two models, got one: {found}"
assert "r holds another job: arguments 0.1 (there: 0.01)" in said, f"nothing was said: {said}"
# What a second sweep would start.
again, said = trained("python", "train.py", "0.1")
assert again == [("0.1", 6, found[1][2])], f"expected its own run again, got {again}: {said}"
