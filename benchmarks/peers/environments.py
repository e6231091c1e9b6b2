"""A virtual environment per peer, made once: torch as pinned for us, then the peer's packages.

Peers pin one another's dependencies apart (protobuf, numpy, jax), and ours must not follow any of
them.  An installation that fails is remembered with its last line, so that a run does not try it
again; removing the folder tries again.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "benchmarks" / ".envs"
CONSTRAINTS = ROOT / "constraints.txt"
INSTALL_S = 900.0
"""For one pip command: a peer that compiles for longer is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What pip is asked for, beside torch."""

    packages: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    """Of those: installed alone, because they pin what cannot be had beside this torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An interpreter, or why there is none."""

    python: str = ""
    absent: str = ""


def environment(needs: Needs, *, install: bool = True) -> Environment:
    """The environment of these packages; makes it at first.  Never raises."""
    folder = FOLDER / _folder_name(needs)
    python = folder / "bin" / "python"
    outcome = _outcome(folder / "outcome.json", needs)
    if outcome is None:
        if not install:
            return Environment(absent="not installed")
        outcome = _make(folder, python, needs)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "outcome.json").write_text(json.dumps([list(needs.packages), outcome]))
    return Environment(absent=outcome) if outcome else Environment(python=str(python))


def _outcome(path: Path, needs: Needs) -> str | None:
    """Why an earlier installation of the same packages failed, "" for it did not, None: none."""
    try:
        packages, reason = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return str(reason) if packages == list(needs.packages) else None


def _folder_name(needs: Needs) -> str:
    """The first package's bare name: peers of one package share."""
    return needs.packages[0].split("[")[0].split("<")[0].split("=")[0]


def _make(folder: Path, python: Path, needs: Needs) -> str:
    """Why it failed, "" when it did not."""
    print(f"installing {', '.join(needs.packages)} into {folder.name} ...", file=sys.stderr)
    held = ("--constraint", str(CONSTRAINTS))
    rest = [name for name in needs.packages if name not in needs.without_dependencies]
    steps = [[sys.executable, "-m", "venv", str(folder)], _pip(python, *held, "torch")]
    if needs.without_dependencies:
        steps.append(_pip(python, "--no-deps", *needs.without_dependencies))
    if rest:
        steps.append(_pip(python, *held, *rest))
    for step in steps:
        reason = _run(step)
        if reason:
            return reason
    return ""


def _pip(python: Path, *arguments: str) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments]


def _run(command: list[str]) -> str:
    """Runs one step; the last error line when it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__} while installing"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR", "error"))]
    return (errors or lines or [f"pip ended with {done.returncode}"])[-1].strip()[:200]
