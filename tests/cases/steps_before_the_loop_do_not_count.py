"""Ten optimizer steps between attach and the loop leave the loop all of its twenty iterations."""

import os
import subprocess
import sys
from pathlib import Path

HEAD = """
import autockpt, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = autockpt.attach(model=model, optimizer=optimizer)

def train():
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

for _ in range(10):  # a learning rate finder, a sanity check
    train()
first, trained = None, 0
"""
LOOPS = {
    "steps": """
for step in ckpt.steps(20):
    first, trained = step if first is None else first, trained + 1
    train()
""",
    "range": """
for step in range(ckpt.step_count, 20):
    first, trained = step if first is None else first, trained + 1
    train()
    ckpt.step()
""",
    "while": """
while ckpt.step_count < 20:
    first, trained = ckpt.step_count if first is None else first, trained + 1
    train()
    ckpt.step()
""",
}
TAIL = "print(first, trained, ckpt.step_count)\n"

for name, loop in LOOPS.items():
    os.mkdir(name)
    Path(name, "train.py").write_text(HEAD + loop + TAIL)
    words = [sys.executable, "train.py"]
    done = subprocess.run(words, cwd=name, capture_output=True, text=True, check=False)
    if done.stdout.split() != ["0", "20", "20"]:
        sys.exit(f"{name}: expected 0 20 20, got {done.stdout!r}; {done.stderr}")
