"""Small user scripts, and a way to run commands on them in processes of their own."""

import atexit
import contextlib
import functools
import os
import subprocess
import sys
from pathlib import Path

from tests.support.warm_python import Nursery, nursery, warm_starts

ROOT = Path(__file__).resolve().parents[3]

ECHO = """
import json, sys
print(json.dumps({"argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__}))
"""


def environment(**extra: str) -> dict[str, str]:
    """The environment without any launcher's variables, with this checkout importable."""
    foreign = ("RANK", "WORLD_SIZE", "SLURM_", "TORCHELASTIC", "AUTOCKPT_", "LOCAL_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return {**kept, "PYTHONPATH": str(ROOT), **extra}


@functools.cache
def _nursery() -> Nursery:
    """One for all tests of this process."""
    held = contextlib.ExitStack()
    atexit.register(held.close)
    return held.enter_context(nursery(environment()))


def warm() -> contextlib.AbstractContextManager[None]:
    """Python processes that `subprocess` starts in it begin with torch and autockpt imported.

    They have their own start-up behind them: what is tested of imports starts cold.
    """
    return warm_starts(_nursery())


def python(
    *arguments: str, cwd: Path, timeout_s: float = 240, **extra: str
) -> "subprocess.CompletedProcess[str]":
    """Run `python ARGUMENTS` in `cwd`, from a cold start."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def autockpt(*arguments: str, cwd: Path, **extra: str) -> "subprocess.CompletedProcess[str]":
    """Run `autockpt ARGUMENTS` in `cwd`, and all that it starts, warm."""
    with warm():
        return python("-m", "autockpt", *arguments, cwd=cwd, **extra)


def boot(*arguments: str, cwd: Path, **extra: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m autockpt.cli.script_runner ARGUMENTS` in `cwd`."""
    return python("-m", "autockpt.cli.script_runner", *arguments, cwd=cwd, **extra)


def write(directory: Path, name: str, source: str) -> Path:
    """A script."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path
