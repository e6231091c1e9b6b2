"""The archiver of a run, as far as the launcher goes: a process beside the training, and below it.

The training never waits for it, and never fails for it.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator

from autockpt.cli.console import Console
from autockpt.cli.signals import Interrupted
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import Archiving

NAME, LOG, LOCK = "archive", "archive.log", "archive.lock"
PATIENCE_S = 600.0
"""For what is left when the training has ended; it goes on by itself after that."""
NICENESS = 10


@contextlib.contextmanager
def archiver_beside(run: RunDirectory, wish: Archiving, console: Console) -> Iterator[None]:
    """Archives what the run commits, as long as the block lasts; then what is left.

    One launcher of a job does it: the first that takes the lock.
    """
    process = None
    with contextlib.ExitStack() as held:
        if wish.codec is not None and held.enter_context(_only_one(run)):
            process = _start(run, wish, console)
        try:
            yield
        finally:
            if process is not None:
                _end(process, run, console)


@contextlib.contextmanager
def _only_one(run: RunDirectory) -> Iterator[bool]:
    """Whether no other launcher of this run archives."""
    fd = os.open(run.logs / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    run: RunDirectory, wish: Archiving, console: Console
) -> "subprocess.Popen[bytes] | None":
    command = [
        sys.executable, "-m", "autockpt", "convert", str(run.path), str(run.path / NAME),
        "--to", "archive", "--codec", str(wish.codec), "--full-every", str(wish.full_every),
        "--follow",
    ]  # fmt: skip
    if wish.lossy and wish.codec != "none":
        console.say(
            f"LOSSY archive of every checkpoint ({wish.codec}) in {run.path / NAME}; what a "
            "restart resumes from stays exact"
        )
    try:
        with open(run.logs / LOG, "ab") as log:
            return subprocess.Popen(
                ["nice", "-n", str(NICENESS), *command], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True, env=_environment(),
            )  # fmt: skip
    except OSError as error:
        console.warn(f"the archiver did not start ({error}); the training goes on without it")
        return None


def _environment() -> dict[str, str]:
    """One thread for arithmetic: the cores are the training's."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _end(process: "subprocess.Popen[bytes]", run: RunDirectory, console: Console) -> None:
    failed = process.poll()
    if failed is None:
        process.terminate()
        try:
            failed = process.wait(PATIENCE_S)
        except (subprocess.TimeoutExpired, Interrupted):
            console.warn("not waiting for the archiver any longer; it finishes by itself")
            return
    if failed:
        console.warn(f"the archiver ended with {failed}; see {run.logs / LOG}")
