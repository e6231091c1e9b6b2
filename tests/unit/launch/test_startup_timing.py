"""What a process did before it attached: told apart where somebody could see it."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autockpt.launch import startup_timing
from autockpt.launch.startup_timing import StartupTimer

TORCH = {
    "torch/__init__.py": "import time\nend = time.monotonic() + 0.05\n"
    "while time.monotonic() < end: pass\n",
    "torch/distributed/__init__.py": "from .distributed_c10d import *\n",
    "torch/distributed/distributed_c10d.py": "import time\n"
    "def init_process_group(backend, seconds):\n"
    "    'Meets.'\n"
    "    end = time.monotonic() + seconds\n"
    "    while time.monotonic() < end: pass\n"
    "    return backend\n",
}
SCRIPT = """
import dataclasses, json, sys
from autockpt.launch import startup_timing
startup_timing.script_begins()
import torch
import torch.distributed as dist
assert dist.init_process_group("gloo", seconds=0.03) == "gloo"
assert dist.init_process_group.__doc__ == "Meets."
assert "exec_module" not in vars(torch.__spec__.loader)
startup_timing.attach_begins()
dist.init_process_group("gloo", seconds=0.5)
attach_at, startup = startup_timing.startup()
startup_timing.attach_begins()
print(json.dumps([dataclasses.asdict(startup), dataclasses.asdict(startup_timing.startup()[1])]))
"""


def told(tmp_path: Path, script: str, **extra: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a process with a torch of no size says of its first and its second attach."""
    for name, source in TORCH.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    root = str(Path(startup_timing.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": f"{tmp_path}:{root}", **extra},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    return first, second


def test_the_parts_of_a_launched_process_are_told_apart(tmp_path: Path) -> None:
    """Each in its place; a second attach in one process has nothing before it."""
    decided = time.monotonic()
    first, second = told(tmp_path, SCRIPT, **{startup_timing.DECIDED: repr(decided)})
    took = time.monotonic() - decided
    assert first["torch_import_s"] == pytest.approx(0.05, abs=0.04)
    assert first["process_group_s"] == pytest.approx(0.03, abs=0.02)
    assert all(value >= 0 for value in first.values())
    assert sum(first.values()) < took - 0.4  # what came after attach is not in it
    assert set(second.values()) == {None}


def test_without_a_boot_module_only_the_sum_is_known(tmp_path: Path) -> None:
    """A plain `python train.py`: the kernel knows when it was born."""
    first, _ = told(tmp_path, SCRIPT.replace("startup_timing.script_begins()\n", ""))
    known = {name for name, value in first.items() if value is not None}
    assert known == {"script_s"}
    assert first["script_s"] >= 0.07


def test_a_time_that_is_none_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's variable must not end a training."""
    monkeypatch.setenv(startup_timing.DECIDED, "soon")
    here = StartupTimer()
    here.attach_begins()
    assert here.startup()[1].launch_s is None
