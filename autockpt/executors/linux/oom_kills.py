"""Processes that the kernel killed for want of memory, as it counts them.

A control group counts its own processes, and in cgroup v2 also processes of groups below it.  The
limit that was reached may be of a group around.  The host counts all.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autockpt.executors.linux.memory import memory_groups
from autockpt.values.units import format_bytes

HOST = "this machine"
TICK_S = 5.0
"""The counts are read this often: a kill that is longer ago than two ticks ended no rank now."""


@dataclass(frozen=True, slots=True)
class OomKills:
    """Counts at one time, by place: directories of control groups from the innermost, the host."""

    counts: dict[str, int]
    """Processes killed in it."""
    reached: dict[str, int]
    """Times that the limit of a group was reached."""
    limits: dict[str, int]
    """Bytes that a group may use, where it has a limit."""

    @classmethod
    def now(
        cls, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
    ) -> "OomKills":
        """A place that cannot be read is left out."""
        counts: dict[str, int] = {}
        reached: dict[str, int] = {}
        limits: dict[str, int] = {}
        for directory, names in memory_groups(proc, cgroup):
            _note(counts, str(directory), directory / names.kills, "oom_kill")
            _note(reached, str(directory), directory / names.kills, names.reached)
            limit = _text(directory / names.limit).strip()
            if limit.isdigit() and int(limit) < 2**60:
                limits[str(directory)] = int(limit)
        _note(counts, HOST, proc / "vmstat", "oom_kill")
        return cls(counts, reached, limits)

    def since(self, before: "OomKills") -> str:
        """Where the kernel has killed, in words; "": nowhere, or no process of the own group."""
        own = next(iter(self.counts), HOST)
        if not _grown(self.counts, before.counts, own):
            return ""
        if own == HOST:
            return "perhaps: the kernel killed a process of this machine for want of memory"
        for place in self.limits:
            if _grown(self.reached, before.reached, place):
                return f"out of memory: {format_bytes(self.limits[place])} are the limit of {place}"
        return f"out of memory: the kernel killed a process of {own} for it"


class OomWatch:
    """The kills of the last moments, for a launcher that has just seen a rank die."""

    def __init__(
        self,
        read: Callable[[], OomKills] = OomKills.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self.begin()

    def begin(self) -> None:
        """Kills before this moment do not count."""
        self._before = self._newest = self._read()
        self._read_s = self._clock()

    def tick(self) -> None:
        """To be called often, while all ranks live."""
        if self._clock() - self._read_s >= TICK_S:
            self._before, self._newest = self._newest, self._read()
            self._read_s = self._clock()

    def killed(self) -> str:
        """As `OomKills.since`, of the last one or two ticks."""
        return self._read().since(self._before)


def _grown(now: dict[str, int], before: dict[str, int], place: str) -> bool:
    return place in now and now[place] > before.get(place, now[place])


def _note(counts: dict[str, int], place: str, file: Path, wanted: str) -> None:
    for line in _text(file).splitlines():
        name, _, count = line.partition(" ")
        if name == wanted and count.strip().isdigit():
            counts[place] = int(count)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
