"""What `beside` starts: `python -m autockpt.cli.follower LOCK PARENT COMMAND...`.

The command ends as if SIGTERM had come when its launcher dies, however that dies, and begins when
the one that an earlier launcher left has ended.
"""

import ctypes
import fcntl
import os
import signal
import sys

NICENESS = 10
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ends the process with the command's exit code."""
    lock, parent, *command = sys.argv[1:]
    # The command unblocks it when it can end well; what came before is not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    _end_with(int(parent))
    os.nice(NICENESS)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # held until this process ends
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting: an earlier launcher's is at its last look", file=sys.stderr, flush=True)
        fcntl.flock(fd, fcntl.LOCK_EX)
    from autockpt.cli import main as autockpt

    autockpt(command)


def _end_with(parent: int) -> None:
    """SIGTERM when the parent dies, or has died already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
