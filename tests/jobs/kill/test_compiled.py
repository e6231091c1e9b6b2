"""A compiled script that dies finds its compiled code at the second start, under `autockpt run`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autockpt.launch.elastic.compiled_code import SCHEDULERS
from tests.jobs.kill.zygote import environment

PATIENCE_S = 1700.0
SCRIPT = """
import os, signal
import torch
import autockpt
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
ckpt = autockpt.attach(model=model, optimizer=optimizer)
run = torch.compile(model)
first = True
for step in ckpt.steps(4):
    run(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if first:
        print("hits", counters["inductor"]["fxgraph_cache_hit"], flush=True)
        first = False
    if step == 2 and not os.path.exists("died"):
        ckpt.save()
    if step == 3 and not os.path.exists("died"):
        ckpt.wait_durable(60.0)
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
print("place", os.environ.get("TORCHINDUCTOR_CACHE_DIR"), flush=True)
"""


def variables() -> dict[str, str]:
    """Of a user who has set no cache; compilers take their temporary files elsewhere."""
    ours = environment()
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", *SCHEDULERS):
        ours.pop(name, None)
    return ours


def run(folder: Path, *settings: str, script: str = SCRIPT) -> str:
    """Output of the whole job."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    sets = [word for setting in settings for word in ("--set", setting)]
    ended = subprocess.run(
        [sys.executable, "-m", "autockpt", "run", "--run-dir", str(folder / "run"), "--no-profile",
         *sets, "--", str(folder / "train.py")],
        env=variables(), cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_policy_switches_the_places_on(tmp_path: Path) -> None:
    """Then the ranks have the variables of the user; by itself so on one machine."""
    told = "import os; print('place', os.environ.get('TORCHINDUCTOR_CACHE_DIR'), flush=True)"
    assert "place None" in run(tmp_path / "one", script=told)
    assert "caches" in run(tmp_path / "on", "restart.caches=on", script=told)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_the_second_start_compiles_nothing_again(tmp_path: Path) -> None:
    """The first start finds nothing, the one after the death finds the graph of it."""
    said = run(tmp_path / "job", "retune=false", "restart.caches=on")
    hits = [int(line.split()[1]) for line in said.splitlines() if line.startswith("hits ")]
    assert len(hits) == 2, said
    assert hits[0] == 0, said
    assert hits[1] > 0, said
    assert f"place {tmp_path / 'job/run/caches'}" in said
