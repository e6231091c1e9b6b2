"""Who follows a run: ends with its launcher, is alone in its run, and holds nobody up."""

import contextlib
import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil

from autockpt.run_directory import RunDirectory
from tests.unit.cli.scripts import ROOT, environment

SCRIPT = str(ROOT / "examples" / "gpt" / "train.py")
JOB = ("--size", "tiny", "--log-every", "1000", "--horizon", "100", "--steps", "5")
LAUNCHER = """
import sys
from autockpt.launch.sidecars.sidecar import Sidecar, beside
from autockpt.console import Console
from autockpt.launch.elastic.signals import signals_raise
from autockpt.run_directory import RunDirectory

command = ("push", "r", sys.argv[1], "--follow")
copier = Sidecar(name="copier", command=command)
with signals_raise(), beside(RunDirectory("r"), [copier], Console()):
    sys.stdin.read()
"""


def until(true: Callable[[], object], patience_s: float = 60.0) -> None:
    """Waits for it."""
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def started(folder: Path, *command: str) -> Iterator["subprocess.Popen[str]"]:
    """A process and what it starts, all of which are gone afterwards."""
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        children: list[psutil.Process] = []
        try:
            until(lambda: process.poll() is not None or _copiers(process))
            children = _copiers(process)
            yield process
        finally:
            process.kill()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def _copiers(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [c for c in psutil.Process(process.pid).children() if "push" in c.cmdline()]
    return []


def gone(process: psutil.Process) -> bool:
    """Also as a zombie that whoever adopted it has not buried yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def taken(path: Path) -> IO[str]:
    """The lock that the copier of an earlier launcher holds, until it is closed."""
    file = path.open("a")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def told(process: psutil.Process) -> bool:
    """Whether SIGTERM waits for it."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    pending = next(line for line in lines if line.startswith("ShdPnd:")).split()[1]
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


def is_held(path: Path) -> bool:
    """Whether a process has the lock."""
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_copier_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    """It looks a last time, and ends well; else each restart would leave one more."""
    logs = RunDirectory.create(tmp_path / "r").logs
    with started(tmp_path, "-c", LAUNCHER, (tmp_path / "store").as_uri()) as launcher:
        (copier,) = _copiers(launcher)
        until(lambda: is_held(logs / "copier.running"))
        launcher.kill()
        until(lambda: gone(copier), 10.0)
        assert "next: autockpt ls" in (logs / "copier.log").read_text()


def test_a_copier_begins_when_the_one_of_an_earlier_launcher_has_ended(tmp_path: Path) -> None:
    """Both would send the same bytes.  That the training has ended it does not forget meanwhile."""
    logs = RunDirectory.create(tmp_path / "r").logs
    earlier = taken(logs / "copier.running")
    with started(tmp_path, "-c", LAUNCHER, (tmp_path / "store").as_uri()) as launcher:
        (copier,) = _copiers(launcher)
        until(lambda: "an earlier launcher" in (logs / "copier.log").read_text())
        assert launcher.stdin is not None
        launcher.stdin.close()
        until(lambda: told(copier))
        assert not gone(copier)
        earlier.close()
        assert launcher.wait(60) == 0
        assert "next: autockpt ls" in (logs / "copier.log").read_text()


def test_a_signal_while_the_last_copy_is_made_loses_no_status_and_no_report(
    tmp_path: Path,
) -> None:
    """The copy is finished without the launcher, whose training had ended well."""
    run, store = RunDirectory.create(tmp_path / "r"), tmp_path / "store"
    earlier = taken(run.logs / "copier.running")
    options = ("--no-profile", "--run-dir", "r", "--set", f"remote.url={store.as_uri()}")
    with started(tmp_path, "-m", "autockpt", "run", *options, SCRIPT, *JOB) as launcher:
        (copier,) = _copiers(launcher)
        until(lambda: told(copier))
        before = run.read_status()
        assert before is not None
        assert (before.state, before.last_step, before.report) == ("finished", 5, None)
        launcher.send_signal(signal.SIGTERM)
        assert "not waiting for the copier" in launcher.communicate(timeout=60)[1]
        assert launcher.returncode == 0
        after = run.read_status()
        assert after is not None
        assert after.report == str(run.report)
        earlier.close()
        until(lambda: gone(copier))
        assert run.newest_remote() is not None
