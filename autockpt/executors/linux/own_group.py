"""Helper processes of a training in process groups of their own: a signal to its group ends none.

Workers of torch's loaders look every five seconds whether their trainer lives.  Until then a forked
one keeps the memory of its trainer's device, so they are ended where no more is asked of them.
Imports nothing large: helpers that are not forked import it.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Collection
from multiprocessing import forkserver
from typing import Any

loops: dict[str, Callable[..., None]] = {}
"""What torch's workers run, by the module that defines it, in a process that has replaced it."""
LOOP = "_worker_loop"
_WORKER = b"pt_data_worker"
"""The name that torch gives the process of a worker."""


def work(definition: str, *arguments: Any, **named: Any) -> None:
    """In a worker of a loader: torch's own function, which the module `definition` has."""
    _leave_group()
    # A worker that was not forked has a module of its own.
    loop = loops.get(definition) or getattr(importlib.import_module(definition), LOOP)
    loop(*arguments, **named)


def end_workers(*, parent: int | None = None, sessions: Collection[int] = ()) -> None:
    """Kill the workers whose parent this is, and those in these sessions whose parent has gone.

    A trainer that the script has started lives on in the session of its rank.
    """
    entries: list[str] = []
    with contextlib.suppress(OSError):
        entries = os.listdir("/proc")
    workers: list[tuple[int, int, int]] = []
    session_of: dict[int, int] = {}
    for entry in entries:
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(entry)
            with open(f"/proc/{pid}/stat", "rb") as file:
                name, _, fields = file.read().partition(b"(")[2].rpartition(b")")
            its_parent, group, session = map(int, fields.split()[1:4])
            session_of[pid] = session
            if name == _WORKER and group == pid:
                workers.append((pid, its_parent, session))
    for pid, its_parent, session in workers:
        is_orphan = session in sessions and session_of.get(its_parent) != session
        if its_parent == parent or is_orphan:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def separate_fork_server() -> None:
    """The process that forks workers, where they are forked so (Python 3.14) and it is to come.

    Workers end when it does.  It begins by importing this module.
    """
    server = getattr(forkserver, "_forkserver", None)
    modules = getattr(server, "_preload_modules", None)
    if isinstance(modules, list) and __name__ not in modules:
        multiprocessing.set_forkserver_preload([*modules, __name__])


def _leave_group() -> None:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)


def _is_fork_server() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is forkserver.main.__code__:
            return True
    return False


if _is_fork_server():
    _leave_group()
