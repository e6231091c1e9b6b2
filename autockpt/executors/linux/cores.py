"""Processors that this process may use: its affinity, and the quota of its control groups.

A container with a limit of CPU time sees every processor of its host.  What runs on more of them
than the quota pays for stands still until the next period.
"""

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Whole processors that may be kept busy, one at least."""
    affinity = len(os.sched_getaffinity(0))
    quota = quota_cores(proc=proc, cgroup=cgroup)
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def quota_cores(
    *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Processors that the tightest control group above this process pays for; None: no limit."""
    quotas = [_quota(directory) for directory in _groups(proc, cgroup)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(directory: Path) -> float | None:
    """Of one group, version 2 or 1."""
    try:
        quota, period = (directory / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (directory / "cpu.cfs_quota_us").read_text().strip()
            period = (directory / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not (quota.isdecimal() and period.isdecimal() and int(quota) and int(period)):
        return None  # "max", -1, or a 0 that limits nothing
    return int(quota) / int(period)


def _groups(proc: Path, root: Path) -> Iterator[Path]:
    """Every CPU control group above this process, the innermost first."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 1 is mounted under the name of one controller, or of several.
        for base in _mounts(root) if controllers else (root,):
            directory = base / path.lstrip("/")
            yield directory
            while directory != base and base in directory.parents:
                directory = directory.parent
                yield directory


def _mounts(root: Path) -> list[Path]:
    return [
        base for name in ("cpu", "cpu,cpuacct", "cpuacct,cpu") if (base := root / name).is_dir()
    ]
