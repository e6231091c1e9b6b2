"""Optimizers with a counter, or an optimizer, inside them go on after a restart; unused NaN too."""

import os
import subprocess
import sys

JOB = """
import os, sys, autockpt, torch
class Own(torch.optim.SGD):
    updates = 0
    def step(self, closure=None):
        self.updates += 1
        return super().step(closure)
    def state_dict(self):
        return {**super().state_dict(), "updates": self.updates}
    def load_state_dict(self, state):
        state = dict(state)
        self.updates = state.pop("updates")
        super().load_state_dict(state)
class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner, self.updates, self.state = inner, 0, {}
        self.defaults, self.param_groups = inner.defaults, inner.param_groups
    def step(self, closure=None):
        self.inner.step(closure)
        self.updates += 1
    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)
model = torch.nn.Linear(2, 1)
model.unused = torch.nn.Parameter(torch.full((1,), float("nan")), requires_grad=False)
kinds = {"own": lambda p: Own(p, lr=0.1), "around": lambda p: Around(torch.optim.Adam(p))}
optimizer = kinds[sys.argv[1]](model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer, run_dir=f"runs/{sys.argv[1]}")
print("starts at", ckpt.step_count, "updates", optimizer.updates)
for _ in ckpt.steps(int(os.environ["TOTAL"])):
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

for kind in ("own", "around"):
    for start, total in ((0, 4), (4, 8)):
        words, known = [sys.executable, "-c", JOB, kind], {**os.environ, "TOTAL": str(total)}
        ran = subprocess.run(words, env=known, capture_output=True, text=True, check=False)
        expected = f"starts at {start} updates {start}"
        if ran.returncode or expected not in ran.stdout:
            sys.exit(f"{kind}: expected {expected!r}, got {ran.stdout!r}\n{ran.stderr[-2000:]}")
