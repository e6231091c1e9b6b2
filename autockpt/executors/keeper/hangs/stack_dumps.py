"""Stacks of a live process, written by a signal handler in C: also from within a collective."""

import contextlib
import faulthandler
import os
import signal
import time

from autockpt import new_files

SIGNAL = signal.SIGRTMIN + 11
"""A signal that no other library is known to use; where a script has it, there are no stacks."""
ANSWER_S = 2.0


def path_of(run_directory: str, rank: int) -> str:
    """Where the stacks of a rank go."""
    return os.path.join(run_directory, "logs", f"stacks-{rank:05d}.txt")


def answer_with_stacks(run_directory: str, rank: int) -> None:
    """From now on this process writes its stacks when it is asked.  Raises OSError."""
    if is_caught(os.getpid()):
        return
    path = path_of(run_directory, rank)
    file = open(path, "ab", buffering=0, opener=new_files.private_for_long)  # noqa: SIM115
    faulthandler.register(SIGNAL, file=file, all_threads=True)


def is_caught(pid: int) -> bool:
    """Whether the process has a handler: without one the signal would end it."""
    caught = status_of(pid).get("SigCgt", "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def ask(run_directory: str, ranks: dict[int, int]) -> dict[int, str]:
    """The stacks of these processes, by rank; "" for one that does not answer.  `ranks`: pids."""
    asked: dict[int, int] = {}
    for rank, pid in ranks.items():
        with contextlib.suppress(OSError, ValueError):
            if is_caught(pid):
                asked[rank] = _size(path_of(run_directory, rank))
                os.kill(pid, SIGNAL)
    found, deadline = dict.fromkeys(ranks, ""), time.monotonic() + ANSWER_S
    while asked and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank, begin in list(asked.items()):
            text = _read(path_of(run_directory, rank), begin)
            if text and text == found[rank]:  # nothing more has come
                del asked[rank]
            found[rank] = text
    return found


def status_of(pid: int) -> dict[str, str]:
    """Fields of /proc/PID/status; empty for a process that is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            rows = (line.partition(":") for line in file)
            return {name: value.strip() for name, _, value in rows}
    except OSError:
        return {}


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _read(path: str, begin: int) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")
    return ""
