"""Runs a training bare, and protected with kills: both must end alike, step by step."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLAN = ("memory.interval=1 steps", "disk.interval=7 steps", "retune=false")
LIMIT_S = 800
_UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def require_undisturbed(
    script: str, run_dir: str, *, ranks: int = 1, alone: bool = False, **options: str
) -> None:
    """Bytes of the end and notes of every iteration equal those of the bare framework.

    `script`: a module of this folder.  `options`: its environment; KILL says where it dies.
    `alone`: the script is started by plain Python, and again by hand.
    """
    folder = Path(run_dir).parent
    command = [sys.executable, str(Path(__file__).with_name(f"{script}.py"))]
    options = {**options, "RANKS": str(ranks)}
    # A group of torch's aborts now and then when its process exits: that is no end of ours.
    bare_options = {**options, "KILL": "", "MODE": "bare", "NOTES": str(folder / "bare")}
    _run(command, folder, bare_options, starts=2)
    sets = [word for one in PLAN for word in ("--set", one)]
    protected = [
        sys.executable, "-m", "autockpt", "run", "--no-profile", "--run-dir", run_dir, *sets,
        *(("--nproc-per-node", str(ranks)) if ranks > 1 else ()), *command[1:],
    ]  # fmt: skip
    if alone:
        protected = command
        options |= {"PLAN": ";".join(PLAN), "AUTOCKPT_NO_PROFILE": "1"}
    said = _run(
        protected,
        folder,
        {**options, "MODE": "protected", "NOTES": str(folder / "protected")},
        starts=1 + alone * len(options["KILL"].split(",")),
    )
    assert said.count("resumed step") >= len(options["KILL"].split(",")), said
    for rank in range(ranks):
        bare, other = (_noted(folder / f"{name}-{rank}") for name in ("bare", "protected"))
        assert other == bare, said
        names = ("bare", "protected")
        ends = [json.loads((folder / f"{name}-{rank}.end").read_text()) for name in names]
        assert ends[1] == ends[0], said


def _noted(file: Path) -> dict[str, Any]:
    """The last line of each iteration, and of each log line."""
    found: dict[str, Any] = {}
    for line in file.read_text().splitlines():
        key, *rest = json.loads(line)
        found[key] = rest
    return found


def _run(command: list[str], folder: Path, options: dict[str, str], *, starts: int = 1) -> str:
    """What it printed.  It is started again, up to `starts` times in all, where it fails."""
    ours = ("AUTOCKPT_", "TORCHELASTIC_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in _UNSET}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    environment = {**kept, **options, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    said, code = "", 1
    for _ in range(starts):
        with subprocess.Popen(
            command, cwd=folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                said += process.communicate(timeout=LIMIT_S)[0]
            finally:
                with contextlib.suppress(ProcessLookupError):  # children of the script, too
                    os.killpg(process.pid, signal.SIGKILL)
        code = process.returncode
        if code == 0:
            break
    assert code == 0, said
    return said
