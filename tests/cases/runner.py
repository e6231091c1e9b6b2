"""Runs each case as a user would: its own process group, its own directory, nothing left behind.

A keeper outlives the process that started it and leads a session of its own.  So every process of
a case carries a mark in its environment, and all that carry it are killed when the case ends.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CASES = Path(__file__).resolve().parent
LIMIT_S = 600.0
"""Longest time (s) that one case may take."""
TAIL_LINES = 30
"""Lines of output that are shown of a case that failed."""
SKIPPED = 77
"""Exit code of a case that this machine cannot run."""
MARK = "CASE_MARK"
"""Environment variable that every process of a case inherits."""
NO_CASES = ("__init__", "__main__", "runner", "conftest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one case ended."""

    name: str
    """The case's file name without its ending."""
    word: str
    """It is `ok`, `skipped` or `FAILED`."""
    detail: str
    """It says why, with the last lines of output; empty where the case is ok."""
    took_s: float
    """Wall time in seconds."""


def scripts(folder: Path) -> dict[str, Path]:
    """Cases in a folder by name, in alphabetical order."""
    found = [p for p in folder.iterdir() if p.suffix in (".py", ".sh") and p.stem not in NO_CASES]
    cases = {p.stem: p for p in sorted(found) if not p.stem.startswith("test_")}
    assert len(cases) == len([p for p in found if not p.stem.startswith("test_")]), "a name twice"
    return cases


def run_case(script: Path, *, limit_s: float = LIMIT_S) -> Result:
    """Run one script in an empty directory; end whatever it started."""
    began_s = time.monotonic()
    mark = uuid.uuid4().hex
    words = ["sh"] if script.suffix == ".sh" else [sys.executable]
    with (
        tempfile.TemporaryDirectory(prefix="case-", ignore_cleanup_errors=True) as work,
        tempfile.TemporaryFile() as output,
    ):
        case = subprocess.Popen(
            [*words, str(script)], cwd=work, env=_environment(os.environ, mark),
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = case.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(case, mark)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    word, detail = _judge(code, lines, limit_s)
    return Result(name=script.stem, word=word, detail=detail, took_s=time.monotonic() - began_s)


def main(folder: Path, names: list[str]) -> int:
    """Run the named cases, or all; returns 0, 1 if a case failed, 2 for a name that is none."""
    cases = scripts(folder)
    unknown = [name for name in names if name not in cases]
    if unknown:
        print(f"no case {', '.join(unknown)}; there are: {', '.join(cases)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names or cases:
        result = run_case(cases[name])
        failed += result.word == "FAILED"
        end = f": {result.detail}" if result.detail else ""
        print(f"{result.word:7} {name} ({result.took_s:.0f} s){end}", flush=True)
    return int(failed > 0)


def _environment(outside: Mapping[str, str], mark: str) -> dict[str, str]:
    """The environment of a user's shell: ours without what a job or a test would have set."""
    ours = ("AUTOCKPT_", "TORCHELASTIC_", "PYTEST_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in outside.items() if not k.startswith(ours) and k not in names}
    commands = str(Path(sys.executable).parent)
    return {**kept, "PATH": f"{commands}:{kept.get('PATH', os.defpath)}", MARK: mark}


def _judge(code: int | None, lines: list[str], limit_s: float) -> tuple[str, str]:
    """Word and detail for an exit code; None stands for a case that had not ended."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    if code == 0:
        return "ok", ""
    if code == SKIPPED:
        return "skipped", last.removeprefix("skipped:").strip()
    why = f"had not ended after {limit_s:g} s" if code is None else f"exit code {code}"
    return "FAILED", "\n    ".join([why, *lines[-TAIL_LINES:]])


def _end(case: "subprocess.Popen[bytes]", mark: str) -> None:
    """Kill the process group and every process with the mark, until none is found."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(case.pid, signal.SIGKILL)
    case.wait()
    deadline_s = time.monotonic() + 20
    while (left := marked(mark)) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def marked(mark: str) -> list[int]:
    """Processes whose environment carries the mark; a zombie has no environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if wanted in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found
