"""The job that is drilled: `autockpt run` as a child process, and how to find its processes."""

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil

from autockpt import new_files
from autockpt.launch.owner import end_with
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import AutockptError
from autockpt.values.telemetry import Event, RunStarted

LOOK_S = 0.1
"""How often a condition is looked at."""
TAIL_CHARS = 2000
"""Of the job's output, in an error."""
NODE = 0
"""A drill has one node."""


class DrillError(AutockptError):
    """The job does not run as it has to without any fault."""

    exit_code = 69


class DrilledJob:
    """One job in a directory of its own; everything of it is ended at the end of the `with`."""

    def __init__(self, run: RunDirectory, options: Sequence[str], script: Sequence[str]) -> None:
        """`options`: of `autockpt run`; `script`: with its arguments."""
        self.run = run
        self.options, self.script = tuple(options), tuple(script)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._seen: set[int] = set()
        """Processes that may have to be ended."""
        self.log = run.path / "drill.log"

    def __enter__(self) -> "DrilledJob":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, or start it again where it was."""
        command = [sys.executable, "-m", "autockpt", "run", "--run-dir", str(self.run.path)]
        new_files.make_directory(self.run.path, new_files.PRIVATE_DIRECTORY)
        with open(self.log, "ab", opener=new_files.private) as log:
            self._launcher = subprocess.Popen(
                [*command, *self.options, *self.script], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
                preexec_fn=partial(end_with, os.getpid()),  # a drill that is killed ends its job
            )  # fmt: skip

    def kill(self) -> None:
        """End launcher, ranks and keeper at once, as the loss of the machine does."""
        if (keeper := self.keeper()) is not None:
            self._seen.add(keeper)
        self._seen |= self._descendants() | set(self.ranks().values())
        if self._launcher is not None:
            self._seen.add(self._launcher.pid)
        for pid in self._seen:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if self._launcher is not None:
            self._launcher.wait()
        psutil.wait_procs([psutil.Process(p) for p in self._seen if psutil.pid_exists(p)], 30)
        self._seen.clear()

    def end(self, patience_s: float) -> None:
        """Tell the launcher to end, and wait for it.  Raises DrillError where it does not."""
        assert self._launcher is not None
        self._launcher.send_signal(signal.SIGTERM)
        try:
            self._launcher.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise DrillError(
                f"the job did not end within {patience_s:.0f} s of SIGTERM; its output: {self.log}"
            ) from None

    def ranks(self) -> dict[int, int]:
        """Pids of the live ranks among the last to attach."""
        pids = {e.rank: e.pid for e in self.run.events() if isinstance(e, RunStarted)}
        return {rank: pid for rank, pid in sorted(pids.items()) if _is_ours(pid, self.run.path)}

    def keeper(self) -> int | None:
        """Pid of the keeper that answers; None: there is none."""
        from autockpt.executors.keeper.launch import connect

        try:
            connection = connect(str(self.run.path), NODE)
        except OSError:
            return None
        try:
            credentials = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        finally:
            connection.close()
        return int(struct.unpack("3i", credentials)[0])

    def wait_for(self, holds: Callable[[list[Event]], bool], patience_s: float, what: str) -> None:
        """Wait until it holds of the events.  Raises DrillError: too late, or the job ended."""
        deadline = time.monotonic() + patience_s
        while not holds(self.run.events()):
            if self._launcher is not None and self._launcher.poll() is not None:
                raise DrillError(
                    f"the job ended with exit code {self._launcher.returncode} before {what}; "
                    f"the end of {self.log}:\n{self._tail()}"
                )
            if time.monotonic() > deadline:
                raise DrillError(f"{what}: not seen in {patience_s:.0f} s; its output: {self.log}")
            time.sleep(LOOK_S)

    def _descendants(self) -> set[int]:
        if self._launcher is None:
            return set()
        try:
            children = psutil.Process(self._launcher.pid).children(recursive=True)
        except psutil.Error:
            return set()
        return {child.pid for child in children}

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-TAIL_CHARS:]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still inside."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def writing_at_most(pid: int, nbytes: int) -> Iterator[None]:
    """No file that the process writes gets longer than this: to it, the disk is full."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def largest_shard_bytes(checkpoints: str) -> int:
    """Of the newest checkpoint; 0: there is none."""
    from autockpt.executors.storage.catalogue import committed_names

    names = committed_names(checkpoints)
    if not names:
        return 0
    files = Path(checkpoints, names[-1]).rglob("*")
    return max((path.stat().st_size for path in files if path.is_file()), default=0)


def _is_ours(pid: int, run: Path) -> bool:
    """Whether the process lives and belongs to this run: numbers are used again."""
    try:
        return psutil.Process(pid).environ().get("AUTOCKPT_RUN_DIR") == str(run)
    except psutil.Error:
        return False
