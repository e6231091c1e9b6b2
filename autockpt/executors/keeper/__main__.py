"""`python -m autockpt.executors.keeper`: becomes the keeper of a node.  Started by `launch`."""

import argparse
import contextlib
import fcntl
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence

from autockpt import new_files
from autockpt.executors.keeper.launch import socket_address, socket_path
from autockpt.executors.keeper.server import Keeper
from autockpt.executors.linux.timeslice import ask_for_long_slices

MOST_DESCRIPTORS = 2**18
"""More than any job has nodes."""
PREDECESSOR_S = 0.9
"""A keeper that has decided to leave is gone within milliseconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Daemonises, takes the node's lock and serves until the run is over."""
    parser = argparse.ArgumentParser(prog="autockpt-keeper", allow_abbrev=False)
    parser.add_argument("--run-directory", required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--checkpoints", required=True)
    options = parser.parse_args(arguments)
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    _settle()
    path = socket_path(options.run_directory, options.node)
    lock_path = os.path.join(os.path.dirname(path), "keeper.lock")
    with open(lock_path, "w", opener=new_files.private) as lock:
        if not _locked(lock.fileno()):
            return 0  # another keeper was faster
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        try:
            keeper = Keeper(options.run_directory, options.node, options.checkpoints)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            with socket_address(path) as address:
                listener.bind(address)
            os.chmod(path, 0o600)
            listener.listen(64)
            keeper.serve(listener)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            return 1
    return 0


def _locked(fd: int) -> bool:
    """Whether we are the keeper; waits a moment for one that is leaving."""
    deadline = time.monotonic() + PREDECESSOR_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
        time.sleep(0.005)


def _settle() -> None:
    """Signals of the terminal and of launchers are for the trainers; ours is the socket.  All
    threads give way to them."""
    new_files.forbid_writing_by_others()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("-500")
    ask_for_long_slices()
    raise_descriptor_limit()


def raise_descriptor_limit() -> None:
    """To what the system allows this process: one connection a node is more than the usual 1024."""
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
