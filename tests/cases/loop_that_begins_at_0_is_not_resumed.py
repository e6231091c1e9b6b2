"""A restart whose loop begins at 0 ends with exit code 91 and trains nothing."""

import os
import subprocess
import sys
from pathlib import Path

JOB = """
import os, signal, sys, torch, autockpt
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.arange(12.0))
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
attached = {"data": loader} if "data" in sys.argv else {}
ckpt = autockpt.attach(model=model, optimizer=optimizer, **attached)
for epoch in range(2):
    for number, (x,) in enumerate(loader):
        model(x[:, None]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with open("trained", "a") as file:
            file.write("x")
        if (epoch, number) == (1, 0):
            ckpt.save()
        if (epoch, number) == (1, 4) and not os.path.exists("died"):
            if not ckpt.wait_durable(60):
                sys.exit("no checkpoint became durable")
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""
BY_RUN = ["autockpt", "run", "--no-profile", "--set", "retune=false", "--run-dir", "r", "job.py"]
BY_PYTHON = [sys.executable, "job.py"]
DIED, REFUSED = -9, 91


def begin(folder: str) -> None:
    """A directory with the script."""
    Path(folder).mkdir()
    Path(folder, "job.py").write_text(JOB)


def start(folder: str, *words: str, **environment: str) -> tuple[int, str, int]:
    """(exit code, what was said, iterations that were trained until now)."""
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, len(Path(folder, "trained").read_text())


def require(holds: bool, expected: str, said: str) -> None:
    """Ends the case where it does not hold."""
    if not holds:
        sys.exit(f"expected {expected}; saw:\n{said}")


for kind in ([], ["data"]):
    folder = f"python-{len(kind)}"
    begin(folder)
    code, said, before = start(folder, *BY_PYTHON, *kind)
    require(code == DIED, "the first start to be killed", said)
    require(
        "a restart will be refused (exit code 91)" in said, "a warning at the first start", said
    )
    code, said, after = start(folder, *BY_PYTHON, *kind)
    require(code == REFUSED, f"exit code 91 of a restart, not {code}", said)
    require("refused: the state was resumed at step" in said, "the reason", said)
    require(after == before, f"nothing to be trained, {after - before} iterations were", said)
code, said, after = start(folder, *BY_PYTHON, *kind, AUTOCKPT_DATA="script")
require(code == 0 and after > before, "a script that sees to its place to go on", said)

begin("run")
code, said, trained = start("run", *BY_RUN)
require(code == REFUSED, f"exit code 91 of `autockpt run`, not {code}", said)
require(trained == 11, f"the 11 iterations of the first start, not {trained}", said)
require("restart 2" not in said, "one restart", said)
require("below resumes" not in said, "no word that the command resumes", said)
