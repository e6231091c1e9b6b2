"""A loop left by `ckpt.step(); break` and entered again gives the samples of an undisturbed run."""

import os
import re
import subprocess
import sys
from pathlib import Path

TRAIN = """
import os, signal, sys, autockpt, torch
data = torch.utils.data.TensorDataset(torch.arange(12.0))
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ckpt = autockpt.attach(model=model, optimizer=optimizer, data=loader)
leave, die = int(sys.argv[1]), int(sys.argv[2])
while ckpt.step_count < 12:
    for step, (x,) in ckpt.batches(12):
        model(x[:, None]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, x.int().tolist(), flush=True)
        if step == die and not os.path.exists("died"):
            open("died", "w").close()
            ckpt.save()
            ckpt.step()
            if not ckpt.wait_durable(60):
                sys.exit("no checkpoint became durable")
            os.kill(os.getpid(), signal.SIGKILL)
        if step == leave:
            ckpt.step()
            break
"""


def samples(folder: str, *, die: int) -> dict[str, str]:
    """Samples by step, of a run that is started again when it was killed."""
    os.mkdir(folder)
    Path(folder, "train.py").write_text(TRAIN)
    told = ""
    for _ in range(3):
        words = [sys.executable, "train.py", "3", str(die)]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        told += done.stdout
        if done.returncode == 0:
            return dict(re.findall(r"(\d+) (\[.*\])", told))
    sys.exit(f"the run did not come to its end: {done.stderr}")


expected = samples("undisturbed", die=99)
if len(expected) != 12:
    sys.exit(f"expected 12 steps, got {len(expected)}")
for die in (2, 4, 8):
    seen = samples(f"killed-behind-{die}", die=die)
    if seen != expected:
        sys.exit(f"killed behind step {die}: expected {expected}, got {seen}")
