"""Few rows of a bank, written by every forward past autograd, tear no checkpoint for long."""

import os
import re
import subprocess
import sys
from pathlib import Path

TRAIN = """
import sys, time, autockpt, torch
from autockpt.values.goal import Goal, Pins

class Memory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bank = torch.nn.Parameter(torch.zeros(60_000, 64))
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(12)])

    def forward(self, x, step):
        for row in range(4):
            self.bank.data[(step * 7919 + row * 104729) % 60_000] += 1
        return self.layers(x).square().mean() + self.bank[:10].sum() * 0

model = Memory()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
goal = Goal(pins=Pins(memory_interval_steps=2, disk_interval_steps=20, retune=False))
ckpt = autockpt.attach(model=model, optimizer=optimizer, goal=goal)
for step in ckpt.steps(60):
    optimizer.zero_grad()
    model(torch.randn(64, 512), step).backward()
    optimizer.step()
    deadline = time.monotonic() + 60
    while step and not ckpt.ready:
        if time.monotonic() > deadline:
            sys.exit("no slots")
        time.sleep(0.01)
"""

Path("train.py").write_text(TRAIN)
environment = {**os.environ, "AUTOCKPT_NO_PROFILE": "1"}
words = [sys.executable, "train.py"]
done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
if done.returncode:
    sys.exit(f"the training failed: {done.stderr}")
found = re.search(r"snapshot step (\d+) \(term 1\) discarded: .*model\.bank", done.stderr)
if found is None:
    sys.exit(f"the bank was not found to change: {done.stderr}")
