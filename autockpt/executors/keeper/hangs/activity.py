"""A rank that marks no progress computes, moves data, or does neither.

A rank moves data while bytes move: through reads and writes of its processes, or through their TCP
connections.  Waking is no evidence: a rank that polls, or prints while it waits, wakes all the
time.  One case is left to it, because the kernel counts nothing there: a read of a Unix socket.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from autockpt.executors.keeper.hangs.stack_dumps import status_of

Activity = Literal["", "computes", "moves data"]

COMPUTES_SHARE = 0.2
"""A rank computes if its threads use more of a core than this, while they do not wait for one."""
MOVES_BYTES_PER_S = 50_000
"""What polls and prints is below it."""
SAMPLE_S = 1.0
"""Rates are of at least so long."""
MOVED_S = 3.0
"""One who has moved data so lately moves data."""
LOADS_DATA = "pt_data"
"""Beginning of the names of processes in which torch loads data."""
READS_UNIX_SOCKET = "unix_stream"
"""Beginning of the kernel function that waits in such a read."""

_USER_TICKS, _SYSTEM_TICKS = 11, 12
"""Fields of /proc/PID/task/TID/stat, counted from behind the name."""
_SOCK_DIAG, _BY_FAMILY, _DUMP = 4, 20, 0x301
_INFO = 2
"""INET_DIAG_INFO, the attribute that holds a `tcp_info`."""
_ACKED, _RECEIVED = 120, 128
"""Offsets of bytes_acked and bytes_received in it, 8 bytes each (Linux 4.1)."""
_CONNECTED = 1 << 1 | 1 << 8
"""States ESTABLISHED and CLOSE_WAIT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Counters of a rank's processes at one moment."""

    at_s: float
    """CLOCK_MONOTONIC."""
    by_thread: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By thread: seconds of a core until now, and seconds for which it has waited for one."""
    on_disk: bool = False
    """One of the processes waits for a disk now."""
    bytes: int | None = 0
    """Through reads and writes until now; None: the kernel does not tell."""
    by_connection: dict[int, int] = field(default_factory=dict)
    """Bytes of each TCP connection until now, by inode."""
    wakes: int = 0
    """Of the main thread and of processes that load data."""
    reads_unix_socket: bool = False
    """The main thread waits in such a read now."""


class Activities:
    """Of the ranks of one node."""

    def __init__(self) -> None:
        self._samples: dict[int, Sample] = {}
        """The newest by process."""
        self._found: dict[int, Activity] = {}
        self._moved_s: dict[int, float] = {}
        """By process: when it was last seen to have moved data, CLOCK_MONOTONIC."""

    def look(self, now_s: float, pid: int) -> Activity:
        """The activity of a process now.  Its first look has no rates."""
        before = self._samples.get(pid)
        if before is not None and 0.0 <= now_s - before.at_s < SAMPLE_S:
            return self._found[pid]
        sample = self._samples[pid] = sample_of(now_s, pid)
        if before is not None and moves_data(before, sample):
            self._moved_s[pid] = now_s
        moves = sample.on_disk or now_s < self._moved_s.get(pid, float("-inf")) + MOVED_S
        computes = before is not None and core_share(before, sample) > COMPUTES_SHARE
        self._found[pid] = "moves data" if moves else "computes" if computes else ""
        return self._found[pid]

    def forget(self, pids: Iterable[int]) -> None:
        """These make progress, or are gone."""
        for pid in pids:
            for table in (self._samples, self._found, self._moved_s):
                table.pop(pid, None)


def moves_data(before: Sample, now: Sample) -> bool:
    """Whether bytes have moved between two looks at a process."""
    woken = now.wakes != before.wakes
    if before.bytes is None or now.bytes is None:
        return woken
    if woken and now.reads_unix_socket:
        return True
    connections = (
        count - before.by_connection.get(inode, 0) for inode, count in now.by_connection.items()
    )
    moved = now.bytes - before.bytes + sum(max(0, count) for count in connections)
    return moved > MOVES_BYTES_PER_S * (now.at_s - before.at_s)


def core_share(before: Sample, now: Sample) -> float:
    """The cores that a rank would use on an idle machine."""
    share = 0.0
    for thread, (used_s, waited_s) in now.by_thread.items():
        used_before_s, waited_before_s = before.by_thread.get(thread, (0.0, 0.0))
        free_s = now.at_s - before.at_s - (waited_s - waited_before_s)
        used_s -= used_before_s
        share += used_s / max(free_s, used_s, 1e-9)
    return share


def sample_of(now_s: float, pid: int) -> Sample:
    """The counters of a process and of all that it and its children have started."""
    on_disk, wakes = False, 0
    moved: int | None = 0
    family = family_of(pid)
    by_thread: dict[int, tuple[float, float]] = {}
    for one in family:
        for task in _threads(one):
            times_s = _times_s(f"/proc/{one}/task/{task}")
            if times_s is not None:
                by_thread[task] = times_s
        status = status_of(one)
        on_disk = on_disk or status.get("State", "").startswith("D")
        if one == pid or status.get("Name", "").startswith(LOADS_DATA):
            wakes += int(status.get("voluntary_ctxt_switches", 0))
        counted = _read_and_written(one)
        moved = None if moved is None or counted is None else moved + counted
    return Sample(
        at_s=now_s, by_thread=by_thread, on_disk=on_disk, bytes=moved,
        by_connection=_by_connection(family), wakes=wakes,
        reads_unix_socket=text_of(f"/proc/{pid}/wchan").startswith(READS_UNIX_SOCKET),
    )  # fmt: skip


def family_of(pid: int) -> list[int]:
    """The process and all descendants: a fork server's workers are its grandchildren.

    The caller is left out: in a container the first process inherits a keeper.
    """
    family, own = [pid], os.getpid()
    for one in family:  # grows while it is walked
        for task in _threads(one):
            children = map(int, text_of(f"/proc/{one}/task/{task}/children").split())
            family += [child for child in children if child not in (own, *family)]
    return family


def _times_s(thread: str) -> tuple[float, float] | None:
    """Seconds of a core and seconds of waiting for one; kernels may tell only the first."""
    times = text_of(f"{thread}/schedstat").split()
    if len(times) > 1:
        return int(times[0]) / 1e9, int(times[1]) / 1e9
    fields = text_of(f"{thread}/stat").rpartition(")")[2].split()
    if len(fields) <= _SYSTEM_TICKS:
        return None
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return ticks / os.sysconf("SC_CLK_TCK"), 0.0


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _read_and_written(pid: int) -> int | None:
    """Bytes; None: this user may not read it."""
    rows = dict(line.split(": ") for line in text_of(f"/proc/{pid}/io").splitlines())
    if "rchar" not in rows or "wchar" not in rows:
        return None
    return int(rows["rchar"]) + int(rows["wchar"])


def _by_connection(pids: Iterable[int]) -> dict[int, int]:
    """Bytes that each TCP connection of the processes has received and sent, by inode."""
    inodes = set[int]()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    if target.startswith("socket:["):
                        inodes.add(int(target[8:-1]))
    if not inodes:
        return {}
    found: dict[int, int] = {}
    with contextlib.suppress(OSError, struct.error):
        for family in (socket.AF_INET, socket.AF_INET6):
            found |= _connections(family)
    return {inode: count for inode, count in found.items() if inode in inodes}


def _connections(family: int) -> dict[int, int]:
    """Bytes by inode of all connections of this network namespace; asks the kernel."""
    wanted = struct.pack(
        "=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _CONNECTED
    )  # fmt: skip
    head = struct.pack("=IHHII", 16 + len(wanted), _BY_FAMILY, _DUMP, 0, 0)
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as asked:
        asked.settimeout(1.0)
        asked.sendall(head + wanted)
        while True:
            data = asked.recv(1 << 16)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind != _BY_FAMILY or length < 16:  # the end, or an error
                    return found
                found.update(_connection(data[16:length]))
                data = data[(length + 3) & ~3 :]


def _connection(record: bytes) -> dict[int, int]:
    """Inode and bytes of an `inet_diag_msg` with its attributes; empty without a count."""
    (inode,) = struct.unpack_from("=I", record, 68)
    record = record[72:]
    while len(record) >= 4:
        length, kind = struct.unpack_from("=HH", record)
        if length < 4:
            break
        if kind == _INFO and length >= 4 + _RECEIVED + 8:
            acked, received = struct.unpack_from("=QQ", record, 4 + _ACKED)
            return {inode: acked + received}
        record = record[(length + 3) & ~3 :]
    return {}


def text_of(path: str) -> str:
    """Of a file, "" where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
