"""The process that `beside` starts: `python -m autockpt.cli.sidecar_main LOCK PARENT COMMAND...`.

The command gets the effect of SIGTERM when its launcher dies, in any way.  It begins when the
command of an earlier launcher has ended.
"""

import fcntl
import os
import signal
import sys

from autockpt import new_files
from autockpt.launch import owner

NICENESS = 10


def main() -> None:
    """Ends the process with the command's exit code."""
    lock, parent, *command = sys.argv[1:]
    # The command unblocks it when it can end well; what came before is not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    owner.end_with(int(parent))
    os.nice(NICENESS)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # held until this process ends
    if not new_files.lock(fd):
        print("waiting: an earlier launcher's is at its last look", file=sys.stderr, flush=True)
        fcntl.flock(fd, fcntl.LOCK_EX)
    from autockpt.cli import main as autockpt

    autockpt(command)


if __name__ == "__main__":
    main()
