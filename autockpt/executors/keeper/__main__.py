"""`python -m autockpt.executors.keeper`: becomes the keeper of a node.  Started by `launch`."""

import argparse
import contextlib
import fcntl
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import IO

from autockpt import new_files
from autockpt.executors.keeper.launch import socket_address, socket_path
from autockpt.executors.keeper.server import Keeper
from autockpt.executors.linux.timeslice import ask_for_long_slices
from autockpt.executors.storage.runtime_paths import note_directory
from autockpt.values.errors import ProtocolError

MOST_DESCRIPTORS = 2**18
"""More than any job has nodes."""
PREDECESSOR_S = 0.9
"""A keeper that has decided to leave is gone within milliseconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes the node's lock and serves until the run is over; without `--child` as a daemon."""
    parser = argparse.ArgumentParser(prog="autockpt-keeper", allow_abbrev=False)
    parser.add_argument("--run-directory", required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--checkpoints", required=True)
    parser.add_argument("--run-id", default="")
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args(arguments)
    if not options.child:
        _leave_parent()
    _settle()
    seat = Seat(options.run_directory, options.node)
    if not seat.take():
        return 0  # another keeper was faster
    try:
        keeper = Keeper(
            options.run_directory, options.node, options.checkpoints, run_id=options.run_id
        )
        keeper.serve(seat.listen(), seat.renew)
        seat.leave()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


class Seat:
    """The directory of a node's keeper, held by its lock, and the socket in it."""

    def __init__(self, run_directory: str, node: int) -> None:
        self._run_directory, self._node = run_directory, node
        self._path = ""
        self._is_in_run = False
        """Its directory is in that of the run, which may be on a network file system."""
        self._lock: IO[str] | None = None

    def take(self, *, wait_s: float = PREDECESSOR_S) -> bool:
        """False: another keeper has it.  Waits so long for one that is leaving."""
        self._path = socket_path(self._run_directory, self._node)
        folder = os.path.dirname(self._path)
        self._is_in_run = os.path.dirname(folder) == os.path.realpath(self._run_directory)
        self._release()
        name = os.path.join(folder, "keeper.lock")
        self._lock = open(name, "w", opener=new_files.private)  # noqa: SIM115
        if not _locked(self._lock.fileno(), wait_s):
            self._release()
            return False
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()
        return True

    def listen(self) -> socket.socket:
        """A socket at its path, which trainers find."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with socket_address(self._path) as address:
            listener.bind(address)
        os.chmod(self._path, 0o600)
        listener.listen(64)
        threading.Thread(  # its storage may hang
            target=note_directory, args=(self._run_directory, self._node), daemon=True
        ).start()
        return listener

    def renew(self) -> socket.socket | None:
        """A new socket if the directory was removed, as the end of a login or of a batch job does.

        None: it is there, or another keeper has its place.  Waits for nothing: the keeper serves.
        """
        if self._is_in_run or os.path.exists(self._path):
            return None
        with contextlib.suppress(OSError, ProtocolError):
            return self.listen() if self.take(wait_s=0.0) else None
        return None

    def leave(self) -> None:
        """No trainer finds it any more; a keeper that has its place is left alone."""
        with contextlib.suppress(OSError):
            if self._holds():
                os.unlink(self._path)
        self._release()

    def _holds(self) -> bool:
        """Whether the lock at the path is the one that it has.  Raises OSError."""
        lock = self._lock
        return lock is not None and os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno()))

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._lock = None


def _locked(fd: int, wait_s: float) -> bool:
    """Whether we are the keeper; waits so long for one that is leaving."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(0.005)


def _leave_parent() -> None:
    """Goes on in a session of its own, whose parent is the system."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def _settle() -> None:
    """Signals of the terminal and of launchers are for the trainers; ours is the socket.  All
    threads give way to them."""
    new_files.forbid_writing_by_others()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    avoid_oom_kills()
    ask_for_long_slices()
    raise_descriptor_limit()
    new_files.raise_size_limit()


def avoid_oom_kills() -> None:
    """The kernel ends other processes before this one; without the rights for that, in usual order.

    The parent of a keeper may be the first in that order: Ray puts its workers there.
    """
    for score in ("-500", "0"):
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(score)
            file.flush()
            return


def raise_descriptor_limit() -> None:
    """Raise it to the system's limit: one connection a node is more than the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
