"""Who follows a run: ends with its launcher, is alone in its run, and comes back."""

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

from autockpt.reports.analysis.degradation import degraded_tiers
from autockpt.run_directory import RunDirectory
from tests.unit.cli.scripts import ROOT, environment

SCRIPT = str(ROOT / "examples" / "gpt" / "train.py")
JOB = ("--size", "tiny", "--log-every", "1000", "--horizon", "100", "--steps", "5")
LAUNCHER = """
import sys
from autockpt.launch.sidecars import sidecar
from autockpt.launch.sidecars.sidecar import Sidecar, beside
from autockpt.console import Console
from autockpt.launch.elastic.signals import signals_raise
from autockpt.run_directory import RunDirectory

sidecar.LOCK_AGAIN_S = sidecar.FIRST_PAUSE_S = sidecar.LOOK_S = 0.1
command = ("push", "r", sys.argv[1], "--follow")
copier = Sidecar(name="copier", command=command, tier="object store")
with signals_raise(), beside(RunDirectory("r"), [copier], Console()):
    sys.stdin.read()
"""

WITHOUT_LOCKS = """
import errno, fcntl, os

def flock(fd, how):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

fcntl.flock = flock
"""


def until(true: Callable[[], object], patience_s: float = 60.0) -> None:
    """Waits for it."""
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def started(
    folder: Path, *command: str, copies: bool = True, **variables: str
) -> Iterator["subprocess.Popen[str]"]:
    """A process and what it starts, all of which are gone afterwards; it `copies` at once."""
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment(**variables), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            until(lambda: not copies or process.poll() is not None or _copiers(process))
            yield process
        finally:
            children = _copiers(process)
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


def ended_well(launcher: "subprocess.Popen[str]") -> str:
    """Ends the training of a launcher; what it said."""
    said = launcher.communicate("", timeout=60)[1]
    assert launcher.returncode == 0, said
    return said


def test_a_copier_that_is_killed_is_started_again(tmp_path: Path) -> None:
    """As by the OOM killer, twice; else no later checkpoint would be copied, in silence."""
    run = RunDirectory.create(tmp_path / "r")
    with started(tmp_path, "-c", LAUNCHER, (tmp_path / "store").as_uri()) as launcher:
        for _ in range(2):
            (copier,) = _copiers(launcher)
            until(lambda: is_held(run.logs / "copier.running"))
            copier.kill()
            until(lambda: gone(copier) and [c for c in _copiers(launcher) if c.pid != copier.pid])  # noqa: B023
        said = ended_well(launcher)
    assert said.count("the copier was killed by SIGKILL; it is started again in") == 2
    assert "next: autockpt ls" in (run.logs / "copier.log").read_text()
    (tier,) = degraded_tiers(run.events())
    assert tier.tier == "object store"
    assert "killed by SIGKILL" in tier.because


def test_a_copier_that_died_before_the_end_looks_a_last_time(tmp_path: Path) -> None:
    """Its pause is longer than what is left of the training."""
    run = RunDirectory.create(tmp_path / "r")
    patient = LAUNCHER.replace("sidecar.FIRST_PAUSE_S = ", "")
    with started(tmp_path, "-c", patient, (tmp_path / "store").as_uri()) as launcher:
        (copier,) = _copiers(launcher)
        copier.kill()
        until(lambda: gone(copier))
        ended_well(launcher)
    assert "next: autockpt ls" in (run.logs / "copier.log").read_text()


def test_a_copier_that_is_refused_is_not_started_again(tmp_path: Path) -> None:
    """The reason is in the message; another start would say the same."""
    run = RunDirectory.create(tmp_path / "r")
    with started(tmp_path, "-c", LAUNCHER, "s3://user:key@bucket/run") as launcher:
        until(lambda: (run.telemetry / "sidecars.jsonl").exists())
        said = ended_well(launcher)
    assert (
        "the copier ended with exit code 78; it is not started again: the URL of an object store"
        in said
    )
    assert said.count("the copier ended") == 1
    (tier,) = degraded_tiers(run.events())
    assert tier.doing.startswith("no more copies are made")


def test_another_launcher_takes_over_when_the_first_is_gone(tmp_path: Path) -> None:
    """The node that copied is lost, and the job goes on without it."""
    logs = RunDirectory.create(tmp_path / "r").logs
    other = taken(logs / "copier.lock")
    store = (tmp_path / "store").as_uri()
    with started(tmp_path, "-c", LAUNCHER, store, copies=False) as launcher:
        time.sleep(0.5)
        assert not _copiers(launcher)
        other.close()
        until(lambda: _copiers(launcher))
        ended_well(launcher)
    assert "next: autockpt ls" in (logs / "copier.log").read_text()


def test_a_file_system_without_locks_has_a_copier_all_the_same(tmp_path: Path) -> None:
    """As Lustre without the mount option `flock`: that no lock can be had is no other launcher."""
    logs = RunDirectory.create(tmp_path / "r").logs
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LOCKS)
    path = f"{tmp_path}:{ROOT}"
    store = (tmp_path / "store").as_uri()
    with started(tmp_path, "-c", LAUNCHER, store, PYTHONPATH=path) as launcher:
        ended_well(launcher)
    assert "next: autockpt ls" in (logs / "copier.log").read_text()


def test_a_directory_of_logs_that_takes_nothing_ends_no_training(tmp_path: Path) -> None:
    """The copier is tried again, and that is said."""
    run = RunDirectory.create(tmp_path / "r")
    (run.logs / "copier.lock").mkdir()
    store = (tmp_path / "store").as_uri()
    with started(tmp_path, "-c", LAUNCHER, store, copies=False) as launcher:
        until(lambda: (run.telemetry / "sidecars.jsonl").exists())
        (run.logs / "copier.lock").rmdir()
        until(lambda: _copiers(launcher))
        assert "the copier did not start ([Errno 21] Is a directory" in ended_well(launcher)
