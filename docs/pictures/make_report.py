"""Makes the picture of the README: trains some minutes, kills the rank twice, shows the report.

It needs chromium.

    make picture            # or: python docs/pictures/make_report.py --minutes 6

The second kill takes the keeper as well, so one restart is from memory and one from disk.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from autockpt.executors.keeper.launch import keeper_status
from autockpt.run_directory import RunDirectory
from autockpt.values.telemetry import RunStarted

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "report.png"
SCRIPT = "examples/gpt/train.py"
JOB = ("--size", "1m", "--batch", "2", "--accumulation", "1", "--threads", "1")
STEP_S = 0.035
"""One iteration of the job, about, on the machine of the picture."""
KILLS = (0.35, 0.7)
"""Parts of the training."""
SIZE = "1000,1100"
POLL_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Train, kill, and write the picture; 1 where the training failed."""
    parser = argparse.ArgumentParser(description="Make the picture of the README.")
    parser.add_argument("--minutes", type=float, default=6.0, help="of training, about")
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args(argv)
    browser = shutil.which("chromium")
    if browser is None:
        parser.error("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="picture-") as place:
        run = RunDirectory(Path(place) / "runs" / "gpt")
        if not trained(run, round(args.minutes * 60 / STEP_S)):
            return 1
        shot = Path(place) / "report.png"
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={place}/browser", f"--window-size={SIZE}",
             f"--screenshot={shot}", run.report.as_uri()],
            check=True, capture_output=True, timeout=240,
        )  # fmt: skip
        shutil.copy(shot, args.out)
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    return 0


def trained(run: RunDirectory, steps: int) -> bool:
    """Train that many steps under `autockpt run`, with the kills; True: it finished."""
    command = [
        sys.executable, "-m", "autockpt", "run", "--run-dir", str(run.path),
        "--set", "failures.mtbf=10 min", SCRIPT, *JOB, "--steps", str(steps), "--log-every", "1000",
    ]  # fmt: skip
    job = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    try:
        for number, part in enumerate(KILLS):
            while (run.newest_step() or 0) < part * steps:
                if job.poll() is not None:
                    return False
                time.sleep(POLL_S)
            keeper = keeper_status(str(run.path), 0)
            if number and keeper is not None:
                os.kill(keeper.pid, signal.SIGKILL)
            started = [event for event in run.events() if isinstance(event, RunStarted)]
            os.kill(started[-1].pid, signal.SIGKILL)
        return job.wait() == 0
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()


if __name__ == "__main__":
    sys.exit(main())
