"""CPU seconds, memory and rest of a process with all that it started, read from /proc."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
QUIET_WINDOW_S = 0.3
QUIET_TICKS = 2
"""Of CPU within the window: what a polling thread takes, less than any copying or writing does."""


def _stat(pid: int) -> list[bytes] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except OSError:
        return None


def descendants(root: int) -> list[int]:
    """All processes below `root`, zombies not yet waited for among them."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat(int(name))
            if fields is not None:
                parents.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    stack = [root]
    while stack:
        children = parents.get(stack.pop(), [])
        found += children
        stack += children
    return found


def cpu_s(helpers: Iterable[int]) -> float:
    """CPU seconds of this process, of all that it started, and of `helpers` with theirs."""
    times = os.times()
    total = time.process_time() + times.children_user + times.children_system
    for helper in helpers:
        total += sum(_ticks(pid) for pid in [helper, *descendants(helper)]) * TICK_S
    return total + sum(_ticks(pid) for pid in descendants(os.getpid())) * TICK_S


def _ticks(pid: int) -> int:
    """Own and waited-for children's; what has gone in between counts in its parent."""
    fields = _stat(pid)
    return 0 if fields is None else sum(int(field) for field in fields[11:15])


def settle(
    helpers: Iterable[int], limit_s: float, finished: Callable[[], bool] = lambda: True
) -> bool:
    """Sleeps until nothing works in the background any more and `finished`; False when never."""
    known, deadline = list(helpers), time.monotonic() + limit_s
    while time.monotonic() < deadline:
        before = cpu_s(known)
        time.sleep(QUIET_WINDOW_S)
        if cpu_s(known) - before <= QUIET_TICKS * TICK_S and finished():
            return True
    return False


def machine_busy_s() -> float:
    """CPU seconds that this machine has spent on anything."""
    with open("/proc/stat") as file:
        fields = [int(field) for field in file.readline().split()[1:]]
    idle_and_waiting = fields[3] + fields[4]
    return (sum(fields[:8]) - idle_and_waiting) * TICK_S


def resident_bytes(pid: int) -> int:
    """Proportional set size: what is shared counts once among those who share it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except OSError:
        return 0


def shared_memory_sizes(pid: int, name: str) -> list[int]:
    """Sizes of the memfds of a process whose name contains `name`, each once."""
    sizes: dict[int, int] = {}
    folder = f"/proc/{pid}/fd"
    for entry in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{entry}")
            if "memfd:" in target and name in target:
                status = os.stat(f"{folder}/{entry}")
                sizes[status.st_ino] = status.st_size
        except OSError:
            continue
    return list(sizes.values())
