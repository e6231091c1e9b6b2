"""One parked process makes others by fork, so that the ranks of a node share what imports allocate.

A twin must be a child of the launcher, which waits for it as for any rank.  So it is forked twice.
The process in between ends, and the kernel hands the twin to the launcher, which asks for that
while it lasts.  Nothing is forked that a fork does not copy whole: a second thread, an open device,
a socket or a watch of the kernel.
"""

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Set
from typing import Any

from autockpt.launch import owner

ADOPTED_S = 5.0
"""The kernel hands a twin over within milliseconds."""
LOOK_S = 0.002
_PR_SET_CHILD_SUBREAPER = 36
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")


# ---------------------------------------------------------------------- in the parked process


def obstacle(own: Set[int]) -> str:
    """Why this process cannot be forked, "" if it can; `own`: descriptors that may stay open."""
    if len(os.listdir("/proc/self/task")) > 1:
        return "an import has started a thread"
    if _is_bad_fork():
        return "an import has initialised CUDA"
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if int(name) in {0, 1, 2, *own}:
                continue
            if target.startswith(("socket:", "anon_inode:")):
                return "an import has opened a socket or a watch of the kernel"
            if target.startswith(_DEVICES):
                return "an import has opened a device"
    return ""


def fork(launcher: int) -> bool:
    """Whether this process is the twin, a child of process `launcher`; it is then its own session.

    Its objects are shared until one of the two writes to them.
    """
    gc.freeze()  # a collection would write to all of them
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    if os.fork():
        os._exit(0)
    os.setsid()
    deadline = time.monotonic() + ADOPTED_S
    while os.getppid() != launcher:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(LOOK_S)
    owner.end_with(launcher, signal.SIGKILL)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()  # as in a fresh process; Python does so for its own
    if _is_bad_fork():
        os._exit(1)
    return True


def _is_bad_fork() -> bool:
    """Whether torch could not use CUDA here, because a process before the fork has asked for it."""
    torch: Any = sys.modules.get("torch")
    told = getattr(getattr(torch, "_C", None), "_cuda_isInBadFork", None)
    return bool(told is not None and told())


# ---------------------------------------------------------------------- in the launcher


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """As long as it lasts the kernel hands orphans among the descendants to this process."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Adopted:
    """A child that this process has not started; it has what is used of `subprocess.Popen`."""

    def __init__(self, pid: int, args: tuple[str, ...]) -> None:
        self.pid, self.args = pid, args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None: it lives."""
        return self._collect(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.  Raises subprocess.TimeoutExpired."""
        if timeout is None:
            found = self._collect(0)
            assert found is not None
            return found
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(LOOK_S)
        return code

    def send_signal(self, number: int) -> None:
        """To the process alone."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """By SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """By SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # another part of the process has waited for it
                pid, status = self.pid, 0
            if pid == self.pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode
