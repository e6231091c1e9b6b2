"""Processes beside a training, and below it: the training never waits for one, nor fails for it."""

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from autockpt.cli.console import Console
from autockpt.cli.signals import Interrupted
from autockpt.run_directory import RunDirectory

PATIENCE_S = 600.0
"""For what is left when the training has ended; it goes on by itself after that."""
NICENESS = 10


@contextlib.contextmanager
def beside(
    run: RunDirectory, name: str, command: Sequence[str], console: Console
) -> Iterator[None]:
    """An `autockpt` command that follows a run, as long as the block lasts; then what is left.

    `name`: what people call it; its log is named so.  SIGTERM tells it that the training has
    ended.  One launcher of a job starts it: the first that takes the lock.
    """
    process = None
    with contextlib.ExitStack() as held:
        if held.enter_context(_only_one(run, name)):
            process = _start(run, name, command, console)
        try:
            yield
        finally:
            if process is not None:
                _end(process, run, name, console)


@contextlib.contextmanager
def _only_one(run: RunDirectory, name: str) -> Iterator[bool]:
    """Whether no other launcher of this run has it."""
    fd = os.open(run.logs / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _start(
    run: RunDirectory, name: str, command: Sequence[str], console: Console
) -> "subprocess.Popen[bytes] | None":
    words = ["nice", "-n", str(NICENESS), sys.executable, "-m", "autockpt", *command]
    try:
        with open(run.logs / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=_environment(),
            )  # fmt: skip
    except OSError as error:
        console.warn(f"the {name} did not start ({error}); the training goes on without it")
        return None


def _environment() -> dict[str, str]:
    """One thread for arithmetic: the cores are the training's."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _end(
    process: "subprocess.Popen[bytes]", run: RunDirectory, name: str, console: Console
) -> None:
    failed = process.poll()
    if failed is None:
        process.terminate()
        try:
            failed = process.wait(PATIENCE_S)
        except (subprocess.TimeoutExpired, Interrupted):
            console.warn(f"not waiting for the {name} any longer; it finishes by itself")
            return
    if failed:
        console.warn(f"the {name} ended with {failed}; see {run.logs / name}.log")
