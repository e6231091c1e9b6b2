"""The PPO example, killed once: its end is that of an undisturbed run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KILLED = """
import glob, os, signal, sys, time
sys.path.insert(0, {examples!r})
import ppo_loop

learn, updates = ppo_loop.learn, []

def killed(*arguments):
    learn(*arguments)
    updates.append(1)
    if len(updates) == 10 and not os.path.exists("killed"):
        deadline = time.monotonic() + 60
        while not glob.glob("run/checkpoints/*/COMMIT*") and time.monotonic() < deadline:
            time.sleep(0.01)
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

ppo_loop.learn = killed
sys.argv = ["ppo_loop.py", "--digest", "--updates", "16"]
ppo_loop.main()
"""


def test_a_killed_training_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """Policy, environment with its generator, and random numbers: one digest."""
    examples = ROOT / "examples" / "frameworks"
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(examples=str(examples)))
    plain = _run([str(examples / "ppo_loop.py"), "--digest", "--updates", "16"], tmp_path / "bare")
    plan = ("memory.interval=1 steps", "disk.interval=4 steps", "retune=false")
    settings = [word for one in plan for word in ("--set", one)]
    command = ["-m", "autockpt", "run", "--no-profile", "--run-dir", "run", *settings, str(script)]
    said = _run(command, tmp_path / "killed")
    assert (tmp_path / "killed" / "killed").exists()
    assert "resumed step" in said
    assert _digest(said) == _digest(plain)


def _digest(said: str) -> str:
    found = re.search("digest ([0-9a-f]{16})", said)
    assert found is not None, said
    return found[1]


def _run(command: list[str], folder: Path) -> str:
    folder.mkdir()
    ours = ("AUTOCKPT_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, text=True, timeout=400, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout
