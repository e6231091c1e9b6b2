"""Facts about this machine: identity, memory headroom, the mount of a directory.

Reads /proc, /sys and limits; writes nothing.  The parsers take text and a reader, so that tests can
hand them the files of any container.
"""

import contextlib
import hashlib
import os
import platform
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from autockpt.values.profile import MemoryHeadroom

ReadText = Callable[[str], str | None]
"""Content of a file, None when it cannot be read."""

_UNLIMITED = 2**60
"""cgroup v1 writes "no limit" as a huge number rounded to pages."""


def read_text(path: str) -> str | None:
    """Content of a small file, None when it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
        return file.read()
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """The file system that a path stands on."""

    point: str
    kind: str
    source: str

    def __str__(self) -> str:
        return f"{self.kind} {self.source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupRoom:
    """The tightest memory limit above this process."""

    limit_bytes: int
    available_bytes: int


def memory_headroom(*, device: Any = None) -> MemoryHeadroom:
    """Return the memory that may still be allocated on this node and on `device`."""
    memory = psutil.virtual_memory()
    room = cgroup_room(
        read_text("/proc/self/cgroup") or "", read_text("/proc/self/mountinfo") or "", read_text
    )
    device_total, device_free = _device_memory(device)
    return MemoryHeadroom(
        host_total_bytes=memory.total,
        host_available_bytes=memory.available,
        cgroup_limit_bytes=room.limit_bytes if room else None,
        cgroup_available_bytes=room.available_bytes if room else None,
        shm_available_bytes=_shm_available(),
        memlock_limit_bytes=_memlock_limit(),
        device_total_bytes=device_total,
        device_available_bytes=device_free,
    )


def cgroup_room(own: str, mounts: str, read: ReadText) -> CgroupRoom | None:
    """The tightest limit over all ancestors, v1 and v2; None when nothing limits.

    `own` is /proc/self/cgroup, `mounts` /proc/self/mountinfo.  Unused page cache (inactive_file)
    counts as available: the kernel drops it before it kills.
    """
    rooms = [
        room
        for directory, names in _cgroup_directories(own, mounts)
        if (room := _level_room(directory, names, read)) is not None
    ]
    return min(rooms, key=lambda room: room.available_bytes, default=None)


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def _cgroup_directories(own: str, mounts: str) -> list[tuple[str, tuple[str, str, str]]]:
    """(directory, file names) of this process's memory cgroups and all their visible ancestors."""
    found = []
    for line in own.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            version, names = "cgroup2", _V2
        elif "memory" in controllers.split(","):
            version, names = "cgroup", _V1
        else:
            continue
        for root, point in _cgroup_mounts(mounts, version):
            # In a container the mount shows a part of the tree: `root` is what stands at `point`.
            inside = path[len(root) :] if root != "/" and path.startswith(root) else path
            directory = os.path.normpath(point + "/" + inside.lstrip("/"))
            while True:
                found.append((directory, names))
                if directory == point or not directory.startswith(point + "/"):
                    break
                directory = os.path.dirname(directory)
    return found


def _cgroup_mounts(mounts: str, version: str) -> list[tuple[str, str]]:
    """(root, mount point) of the hierarchies that can hold the memory controller."""
    found = []
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or not kind or kind[0] != version:
            continue
        if version == "cgroup" and "memory" not in kind[-1].split(","):
            continue
        found.append((_unescape(fields[3]), _unescape(fields[4])))
    return found


def _level_room(directory: str, names: tuple[str, str, str], read: ReadText) -> CgroupRoom | None:
    limit_text, usage_text = read(f"{directory}/{names[0]}"), read(f"{directory}/{names[1]}")
    if limit_text is None or usage_text is None or limit_text.strip() == "max":
        return None
    try:
        limit, usage = int(limit_text), int(usage_text)
    except ValueError:
        return None
    if limit >= _UNLIMITED:
        return None
    idle_cache = 0
    for line in (read(f"{directory}/memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == names[2] and value.strip().isdigit():
            idle_cache = int(value)
    left = limit - max(0, usage - idle_cache)
    return CgroupRoom(limit_bytes=limit, available_bytes=max(0, left))


def mount_of(path: str, *, mounts: str | None = None) -> Mount:
    """The mount that `path` (or its nearest existing ancestor) stands on."""
    text = mounts if mounts is not None else read_text("/proc/self/mountinfo") or ""
    target = os.path.realpath(path)
    best = Mount(point="/", kind="unknown", source="unknown")
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 2:
            continue
        point = _unescape(fields[4])
        inside = point == "/" or target == point or target.startswith(point + "/")
        # Of two mounts on one point the later hides the earlier.
        if inside and len(point) >= len(best.point):
            best = Mount(point=point, kind=kind[0], source=_unescape(kind[1]))
    return best


def _unescape(text: str) -> str:
    """mountinfo writes blanks, tabs, newlines and backslashes as octal."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def host_identity() -> str:
    """Digest of what makes this machine this machine, the same after a reboot; not its name."""
    facts = [
        (read_text("/etc/machine-id") or read_text("/var/lib/dbus/machine-id") or "").strip(),
        platform.machine(),
        cpu_name(),
        str(psutil.cpu_count(logical=True)),
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def cpu_name() -> str:
    """The processor as it calls itself, e.g. "AMD EPYC 9B14"."""
    for line in (read_text("/proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine()


def gpu_names() -> tuple[str, ...]:
    """Names of the GPUs that torch sees, () without one."""
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _shm_available() -> int | None:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def _memlock_limit() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _device_memory(device: Any) -> tuple[int | None, int | None]:
    """(total, free) bytes of a CUDA device, Nones otherwise."""
    if getattr(device, "type", "") != "cuda":
        return None, None
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total, free
