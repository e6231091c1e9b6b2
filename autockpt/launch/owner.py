"""A process ends with the one that started it, however that ends."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2


def end_with(parent: int, number: int = signal.SIGTERM) -> None:
    """The kernel sends this process signal `number` when `parent` dies, or has died already.

    `parent`: id of the process that started this one.  Where another one did, nothing happens.
    """
    if os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent and not is_alive(parent):
        os.kill(os.getpid(), number)


def number_at_parents_end() -> int:
    """The signal that the kernel sends when the parent of this thread dies; 0: none."""
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value


def is_alive(pid: int) -> bool:
    """Whether there is such a process, of whichever user; one that was only not waited for is
    dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
