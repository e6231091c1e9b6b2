"""A slow store at the lowest seam: `pwrite` and `preadv` last at least bytes / rate.

The bytes go to the real disk; what is missing to the time that a store of this speed would take is
slept.  So the executors' own code runs, its system calls included, on storage of a known speed that
does not depend on what the machine's disk does at the moment.  A rate holds for all files together
(a disk) or for each by itself (a network store whose streams are limited).
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

RATE = "BENCH_STORE_BYTES_PER_S"
PER_FILE = "BENCH_STORE_PER_FILE"
"""Environment of a process that starts on a slow store: see slow/sitecustomize.py."""


class SlowStore:
    """Times calls on files as a store of this speed would; its clock runs on by bytes / rate."""

    def __init__(self, bytes_per_s: float, *, per_file: bool = False) -> None:
        self.bytes_per_s = bytes_per_s
        self.per_file = per_file
        self.busy_s = 0.0
        """What the store's own work added up to."""
        self._lock = threading.Lock()
        self._free_at: dict[int, float] = {}

    def pass_through(self, fd: int, move: Callable[[], int]) -> int:
        """Moves the bytes, then waits until the store would be done with them."""
        began = time.monotonic()
        count = move()
        key = fd if self.per_file else -1
        with self._lock:
            start = max(began, self._free_at.get(key, 0.0))
            done = max(start + count / self.bytes_per_s, time.monotonic())
            self._free_at[key] = done
            self.busy_s += done - start
        time.sleep(max(0.0, done - time.monotonic()))
        return count


def install(store: SlowStore) -> Callable[[], None]:
    """Puts `store` under this process's file calls; what is returned takes it away."""
    pwrite, preadv = os.pwrite, os.preadv

    def slow_write(fd: int, data: Any, at: int) -> int:
        return store.pass_through(fd, lambda: pwrite(fd, data, at))

    def slow_read(fd: int, buffers: Any, at: int, flags: int = 0) -> int:
        return store.pass_through(fd, lambda: preadv(fd, buffers, at, flags))

    os.pwrite, os.preadv = slow_write, slow_read

    def remove() -> None:
        os.pwrite, os.preadv = pwrite, preadv

    return remove


@contextmanager
def slow_store(bytes_per_s: float) -> Iterator[SlowStore]:
    """This process on a slow store."""
    store = SlowStore(bytes_per_s)
    remove = install(store)
    try:
        yield store
    finally:
        remove()


def install_from_environment() -> None:
    """For a process that was started on a slow store."""
    rate = os.environ.get(RATE)
    if rate:
        install(SlowStore(float(rate), per_file=os.environ.get(PER_FILE) == "1"))


@contextmanager
def keepers_on_a_slow_store(bytes_per_s: float, *, per_file: bool) -> Iterator[None]:
    """Keepers that are started in here write to a slow store."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "slow")
    said = {
        RATE: str(bytes_per_s),
        PER_FILE: "1" if per_file else "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
    }
    before = {name: os.environ.get(name) for name in said}
    os.environ.update(said)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
