"""Processes beside a training, and below it: the training never waits for one, nor fails for it."""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autockpt import new_files
from autockpt.console import Console
from autockpt.launch.elastic.signals import Interrupted
from autockpt.run_directory import RunDirectory

PATIENCE_S = 600.0
"""Time for remaining work when the training has ended; it goes on by itself after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """An `autockpt` command that follows a run until SIGTERM, then looks a last time."""

    name: str
    """Its name for people and for its log."""
    command: tuple[str, ...]


_Running = list[tuple[Sidecar, "subprocess.Popen[bytes]"]]


@dataclass(slots=True)
class Patience:
    """How long what is left is waited for."""

    by_s: float | None = None
    """CLOCK_MONOTONIC; None: as long as it mostly takes."""


@contextlib.contextmanager
def beside(run: RunDirectory, followers: Sequence[Sidecar], console: Console) -> Iterator[Patience]:
    """They follow the run as long as the block lasts; then what is left.

    SIGTERM tells them that the training has ended, and so does the death of this process.  One
    launcher of a job starts each: the first that takes its lock.  A signal (`signals_raise`) ends
    the waiting, and they finish by themselves.
    """
    running: _Running = []
    patience, patience_s = Patience(), PATIENCE_S
    with contextlib.ExitStack() as held:
        try:
            for follower in followers:
                if held.enter_context(_only_one(run, follower)):
                    running += _start(run, follower, console)
            yield patience
            if patience.by_s is not None:
                patience_s = min(PATIENCE_S, max(0.0, patience.by_s - time.monotonic()))
        except Interrupted:
            patience_s = 0.0
            raise
        finally:
            _end(running, run, console, patience_s)


@contextlib.contextmanager
def _only_one(run: RunDirectory, follower: Sidecar) -> Iterator[bool]:
    """Whether no other launcher of this run has it."""
    fd = os.open(run.logs / f"{follower.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _start(run: RunDirectory, follower: Sidecar, console: Console) -> _Running:
    words = [
        sys.executable, "-m", "autockpt.cli.sidecar_main",
            str(run.logs / f"{follower.name}.running"),
        str(os.getpid()), *follower.command,
    ]  # fmt: skip
    path = run.logs / f"{follower.name}.log"
    try:
        with open(path, "ab", opener=new_files.private) as log:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=_environment(),
            )  # fmt: skip
    except OSError as error:
        console.warn(
            f"the {follower.name} did not start ({error}); the training goes on without it"
        )
        return []
    return [(follower, process)]


def _environment() -> dict[str, str]:
    """One thread for arithmetic: the cores are the training's."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _end(running: _Running, run: RunDirectory, console: Console, patience_s: float) -> None:
    ended_s = time.monotonic() + patience_s
    with contextlib.suppress(subprocess.TimeoutExpired, Interrupted):
        for _, process in running:
            if process.poll() is None:
                process.terminate()
        for _, process in running:
            process.wait(max(0.0, ended_s - time.monotonic()))
    for follower, process in running:
        failed = process.poll()
        if failed is None:
            console.warn(f"not waiting for the {follower.name} any longer; it finishes by itself")
        elif failed:
            log = run.logs / f"{follower.name}.log"
            console.warn(f"the {follower.name} ended with {failed}; see {log}")
