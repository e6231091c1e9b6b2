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


def end_workers(*, parent: int = 0, sessions: Collection[int] = ()) -> None:
    """Kill the workers whose parent this is, or that are in one of these sessions."""
    entries: list[str] = []
    with contextlib.suppress(OSError):
        entries = os.listdir("/proc")
    for entry in entries:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(entry)}/stat", "rb") as file:
                name, _, fields = file.read().partition(b"(")[2].rpartition(b")")
            _, its_parent, group, session = fields.split()[:4]
            is_apart = name == _WORKER and int(group) == int(entry)
            if is_apart and (int(its_parent) == parent or int(session) in sessions):
                os.kill(int(entry), signal.SIGKILL)


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
