"""Processes beside a training, and below it: the training never waits for one, nor fails for it.

One that dies is started again, after a pause that doubles.  One launcher of a job has each: the
first that takes its lock.  When that launcher dies, another one takes the lock and starts it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autockpt import new_files
from autockpt.console import Console
from autockpt.executors.storage.event_log import TelemetryWriter, newest_bytes
from autockpt.launch.elastic.signals import Interrupted
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import ConfigError, GuardError
from autockpt.values.telemetry import Degraded
from autockpt.values.units import format_duration

PATIENCE_S = 600.0
"""Time for remaining work when the training has ended; it goes on by itself after that."""
LOOK_S = 1.0
"""Between two looks at the processes."""
JOIN_S = 5.0
"""For the look under way; a file system may hang."""
LOCK_AGAIN_S = 5.0
"""Between two tries for a lock that another launcher has."""
FIRST_PAUSE_S = 1.0
"""Before the first new start; doubled for each further one."""
MOST_STARTS = 10
"""New starts in a row; the pauses between them take 17 minutes in all."""
LASTED_S = 600.0
"""A process that has lived so long begins the count anew."""
FINAL = (ConfigError.exit_code, GuardError.exit_code)
"""Exit codes after which another start would end in the same way."""
_LAST_BYTES = 2000
_MOST_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """An `autockpt` command that follows a run until SIGTERM, then looks a last time."""

    name: str
    """Its name for people and for its log."""
    command: tuple[str, ...]
    tier: str = ""
    """Its tier, as in `Degraded.what`; "": it serves none."""


@dataclass(slots=True)
class Patience:
    """How long what is left is waited for."""

    by_s: float | None = None
    """CLOCK_MONOTONIC; None: as long as it mostly takes."""


@contextlib.contextmanager
def beside(run: RunDirectory, followers: Sequence[Sidecar], console: Console) -> Iterator[Patience]:
    """They follow the run as long as the block lasts; then what is left.

    SIGTERM tells them that the training has ended, and so does the death of this process.  A signal
    (`signals_raise`) ends the waiting, and they finish by themselves.
    """
    kept = [_Kept(run, follower, console) for follower in followers]
    patience, patience_s = Patience(), PATIENCE_S
    ended = threading.Event()
    thread = threading.Thread(target=_look_after, args=(kept, ended, console), daemon=True)
    try:
        for one in kept:
            one.look()
        if kept:
            thread.start()
        yield patience
        if patience.by_s is not None:
            patience_s = min(PATIENCE_S, max(0.0, patience.by_s - time.monotonic()))
    except Interrupted:
        patience_s = 0.0
        raise
    finally:
        ended.set()
        _end(kept, thread, patience_s)


def _look_after(kept: "Sequence[_Kept]", ended: threading.Event, console: Console) -> None:
    """A process that this thread has started gets SIGTERM when the thread ends (`owner`)."""
    while not ended.wait(LOOK_S):
        for one in kept:
            try:
                one.look()
            except Exception as error:
                console.warn(f"the {one.name} is not started again if it dies: {error!r:.300}")
                return


def _end(kept: "Sequence[_Kept]", thread: threading.Thread, patience_s: float) -> None:
    ended_s = time.monotonic() + patience_s
    with contextlib.suppress(subprocess.TimeoutExpired, Interrupted):
        if thread.is_alive():
            thread.join(JOIN_S)
        for one in kept:
            one.tell()
        for one in kept:
            one.wait(ended_s)
    for one in kept:
        one.leave()


class _Kept:
    """One sidecar, if this launcher has it: its lock, its process, its new starts."""

    def __init__(self, run: RunDirectory, sidecar: Sidecar, console: Console) -> None:
        self.name = sidecar.name
        self._run, self._sidecar, self._console = run, sidecar, console
        self._log = run.logs / f"{sidecar.name}.log"
        self._lock: int | None = None
        """Descriptor of the lock file, once the lock is ours."""
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0
        self._next_s = 0.0
        """CLOCK_MONOTONIC of the next try."""
        self._deaths = 0
        """In a row, without a long life between them."""
        self._is_given_up = self._is_refused = False
        self._telemetry: TelemetryWriter | None = None

    def look(self) -> None:
        """Start it where no launcher has it, and again when it died."""
        now_s = time.monotonic()
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            self._died(_how(code), lasted_s=now_s - self._began_s, code=code)
        elif (
            self._process is None
            and now_s >= self._next_s
            and not self._is_given_up
            and self._has_lock()
        ):
            self._start()

    def tell(self) -> None:
        """Say that the training has ended; a process that has died gets a last start for that."""
        if self._lock is not None and not self._is_refused:
            if self._process is None or self._process.poll() is not None:
                self._start()
            if self._process is not None:
                self._process.terminate()

    def wait(self, by_s: float) -> None:
        """Raises TimeoutExpired."""
        if self._process is not None:
            self._process.wait(max(0.0, by_s - time.monotonic()))

    def leave(self) -> None:
        """Say what did not end well, and give the lock back."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                self._console.warn(
                    f"not waiting for the {self.name} any longer; it finishes by itself"
                )
            elif code:
                self._console.warn(f"the {self.name} {_how(code)}; see {self._log}")
        if self._telemetry is not None:
            self._telemetry.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _has_lock(self) -> bool:
        """Whether no other launcher has it; where there are no locks, each launcher has its own."""
        if self._lock is not None:
            return True
        path = str(self._run.logs / f"{self.name}.lock")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, new_files.PRIVATE)
        except OSError as error:
            self._died(f"did not start ({error})", lasted_s=0.0)
            return False
        if new_files.lock(fd):
            self._lock = fd
        else:
            os.close(fd)
            self._next_s = time.monotonic() + LOCK_AGAIN_S
        return self._lock is not None

    def _start(self) -> None:
        words = [
            sys.executable, "-m", "autockpt.cli.sidecar_main",
                str(self._run.logs / f"{self.name}.running"),
            str(os.getpid()), *self._sidecar.command,
        ]  # fmt: skip
        self._began_s = time.monotonic()
        try:
            with open(self._log, "ab", opener=new_files.private) as log, _sigterm_waits():
                self._process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    env=_environment(),
                )  # fmt: skip
        except OSError as error:
            self._died(f"did not start ({error})", lasted_s=0.0)

    def _died(self, how: str, *, lasted_s: float, code: int | None = None) -> None:
        """Decide when it is started again, and say that."""
        if code == 0:  # it was told to end, as Slurm tells all processes of a step
            self._next_s = time.monotonic() + FIRST_PAUSE_S
            return
        self._deaths = 1 if lasted_s > LASTED_S else self._deaths + 1
        self._is_refused = code in FINAL
        self._is_given_up = self._is_refused or self._deaths > MOST_STARTS
        pause_s = FIRST_PAUSE_S * 2 ** (self._deaths - 1)
        self._next_s = time.monotonic() + pause_s
        if self._is_refused:
            then = f"it is not started again: {_last_line(self._log)}"
        elif self._is_given_up:
            then = f"it died {self._deaths} times and is not started again before the end"
        else:
            then = f"it is started again in {format_duration(pause_s)}"
        self._console.warn(f"the {self.name} {how}; {then}; its log is {self._log}")
        self._emit(f"the {self.name} {how}; {then}")

    def _emit(self, reason: str) -> None:
        if self._telemetry is None:
            self._telemetry = TelemetryWriter(str(self._run.telemetry / "sidecars.jsonl"))
        self._telemetry.emit(self._degraded(reason))

    def _degraded(self, reason: str) -> Degraded:
        now_s, tier = time.monotonic(), self._sidecar.tier
        if not tier:
            return Degraded(at_s=now_s, rank=-1, what="archiver", reason=reason)
        if self._is_given_up:
            return Degraded(at_s=now_s, rank=-1, what="copier", reason=reason)
        return Degraded(at_s=now_s, rank=-1, what=tier, reason=reason)


def _how(code: int) -> str:
    """How a process ended, from its exit code."""
    if code < 0:
        with contextlib.suppress(ValueError):  # a real-time signal
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    return f"ended with exit code {code}"


def _last_line(log: Path) -> str:
    """The last words of the process."""
    lines = newest_bytes(log, _LAST_BYTES).decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return last.removeprefix("autockpt: ").removeprefix("error: ")[:_MOST_CHARS]


@contextlib.contextmanager
def _sigterm_waits() -> Iterator[None]:
    """A process that is started meanwhile has SIGTERM blocked from its first instant."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment() -> dict[str, str]:
    """One thread for arithmetic: the cores are the training's."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
