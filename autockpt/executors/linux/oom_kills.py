"""Processes that the kernel killed for want of memory, as it counts them.

A control group counts its own; a group of cgroup v2 also those below it.  The host counts all.
"""

from dataclasses import dataclass
from pathlib import Path

from autockpt.executors.linux.memory import memory_groups
from autockpt.values.units import format_bytes

HOST = "this machine"


@dataclass(frozen=True, slots=True)
class OomKills:
    """Counts at one time, by place: directories of control groups from the innermost, the host."""

    counts: dict[str, int]
    limits: dict[str, int]
    """Bytes that a group may use, where it has a limit."""

    @classmethod
    def now(
        cls, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
    ) -> "OomKills":
        """A place that cannot be read is left out."""
        counts: dict[str, int] = {}
        limits: dict[str, int] = {}
        for directory, names in memory_groups(proc, cgroup):
            _note(counts, str(directory), directory / names.kills)
            limit = _text(directory / names.limit).strip()
            if limit.isdigit() and int(limit) < 2**60:
                limits[str(directory)] = int(limit)
        _note(counts, HOST, proc / "vmstat")
        return cls(counts, limits)

    def since(self, before: "OomKills") -> str:
        """Where the kernel has killed, in words; "": nowhere.

        The innermost group with a limit stands for those around it.
        """
        grown = [
            place for place, count in self.counts.items() if count > before.counts.get(place, count)
        ]
        limited = [place for place in grown if place in self.limits]
        if limited:
            place = limited[0]
            return f"out of memory: {format_bytes(self.limits[place])} are the limit of {place}"
        return "out of memory: the kernel killed a process of this machine for it" if grown else ""


def _note(counts: dict[str, int], place: str, file: Path) -> None:
    for line in _text(file).splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.strip().isdigit():
            counts[place] = int(count)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
