"""In the keeper of a campaign: dies by SIGKILL before one operation on the file system, once.

Python imports this module at its start when its folder is on PYTHONPATH, so the keeper's own code
is what runs.  KILLED_KEEPER names a file that says which operation; who takes it away dies.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

NAMES = (
    "write", "pwrite", "fsync", "ftruncate", "link", "unlink", "rename", "mkdir", "rmdir",
    "open",
)  # fmt: skip


class Counter:
    """Of all threads together."""

    def __init__(self, order: str) -> None:
        self._order, self._lock, self._count = order, threading.Lock(), 0
        with open(order) as file:
            self._at = int(file.read())

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, counted."""

        def call(*args: Any, **more: Any) -> Any:
            with self._lock:
                mine, self._count = self._count, self._count + 1
            if mine == self._at and self._taken():
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return call

    def _taken(self) -> bool:
        try:
            os.replace(self._order, f"{self._order}.done")
        except OSError:
            return False  # an earlier keeper was killed already
        return True


if "autockpt.executors.keeper" in sys.orig_argv and os.path.exists(os.environ["KILLED_KEEPER"]):
    counter = Counter(os.environ["KILLED_KEEPER"])
    from autockpt.executors.storage import shard_file

    for name in NAMES:
        setattr(os, name, counter.wrap(getattr(os, name)))
    shard_file.fallocate = counter.wrap(shard_file.fallocate)
