"""Each attach of a process is a run of its own, also after close(); a restart resumes both."""

import os
import subprocess
import sys

SCRIPT = """
import os, autockpt, torch
for fold in range(2):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = autockpt.attach(model=model, optimizer=optimizer)
    print(ckpt.step_count, end=" ")
    for step in ckpt.steps(5 + fold):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    if os.environ["HOW"] == "close":
        ckpt.close()
"""

with open("folds.py", "w") as file:
    file.write(SCRIPT)
for how, expected in (("left", "0 0 "), ("close", "5 6 ")):
    os.environ["HOW"] = how
    done = subprocess.run([sys.executable, "folds.py"], capture_output=True, text=True)
    if (done.returncode, done.stdout) != (0, expected):
        print(done.stderr)
        sys.exit(f"{how}: expected 0 and {expected!r}, got {done.returncode} and {done.stdout!r}")
