"""Threads that begin at the end of the process, too.

Python 3.12 starts no thread behind the script's last line, and our last checkpoint is made there.
So a few threads wait from the beginning for work of that time.
"""

import contextlib
import queue
import sys
import threading
from collections.abc import Callable

SPARE = 4
"""A look at the disk, an answer to a signal that comes meanwhile, and a watch of the output.  A
look that hangs keeps its thread."""
is_needed = sys.version_info >= (3, 12)

_work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
_lock = threading.Lock()
_spare: list[threading.Thread] = []


def reserve() -> None:
    """Starts the threads that wait, once in a process."""
    with _lock:
        while is_needed and sum(thread.is_alive() for thread in _spare) < SPARE:
            thread = threading.Thread(target=_serve, name="autockpt-spare", daemon=True)
            thread.start()
            _spare.append(thread)


def start(work: Callable[[], object], name: str) -> None:
    """Runs `work` on a thread of this name, or on one that waits where none can be started.

    Raises RuntimeError where none waits either.
    """
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        if not any(thread.is_alive() for thread in _spare):
            raise
        _work.put(work)


def _serve() -> None:
    while True:
        work = _work.get()
        with contextlib.suppress(Exception):
            work()
