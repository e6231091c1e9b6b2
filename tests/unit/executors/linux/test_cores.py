"""Processors under a quota: made-up control groups of both versions, and a real one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autockpt.cli.doctor import machine
from autockpt.executors.linux.cores import quota_cores, usable_cores


def tree(folder: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A made-up /proc and /sys/fs/cgroup."""
    proc, root = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    root.mkdir()
    (proc / "self" / "cgroup").write_text(own)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return proc, root


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2.0),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, None),
        ("2:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n",
         "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"}, 3.0),
        ("2:cpu:/docker/x\n", {"cpu/cpu.cfs_quota_us": "25000",
         "cpu/cpu.cfs_period_us": "50000"}, 0.5),
        ("2:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "9\n"}, None),
        ("3:cpuset:/a\n", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "1"}, None),
        ("0::/\n", {"cpu.max": "much\n"}, None),
        ("0::/\n", {"cpu.max": "1 0\n"}, None),
        ("0::/\n", {"cpu.max": "0 100000\n"}, None),
        ("", {}, None),
    ],
    ids=["v2", "v2 parent", "v2 inner", "v2 none", "v1", "v1 namespace", "v1 none",
         "other", "nonsense", "no period", "no quota", "no groups"],
)  # fmt: skip
def test_the_tightest_quota_counts(
    tmp_path: Path, own: str, files: dict[str, str], quota: float | None
) -> None:
    """Of all groups above the process; whole processors, one at least."""
    proc, root = tree(tmp_path, own, files)
    assert quota_cores(proc=proc, cgroup=root) == quota
    affinity = len(os.sched_getaffinity(0))
    expected = affinity if quota is None else max(1, min(affinity, int(quota)))
    assert usable_cores(proc=proc, cgroup=root) == expected


def test_a_real_group_with_a_quota_is_seen_and_told() -> None:
    """As `docker --cpus=1.5` and a pod's limit make one; `doctor` says what to set."""
    group = Path("/sys/fs/cgroup/cpu" if Path("/sys/fs/cgroup/cpu").is_dir() else "/sys/fs/cgroup")
    group /= f"autockpt-test-{os.getpid()}"
    try:
        group.mkdir()
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_quota_us").write_text("150000")
        else:
            (group / "cpu.max").write_text("150000 100000")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"needs a CPU control group of its own: {error}")
    code = (
        "from autockpt.cli.doctor.machine import _cpu\n"
        "from autockpt.executors.linux.cores import *\n"
        "print(quota_cores(), usable_cores())\n"
        "print(_cpu({}).fix, _cpu({'OMP_NUM_THREADS': '1'}).status, sep='|')\n"
    )
    try:
        enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        done = subprocess.run(
            ["sh", "-c", enter, "sh", sys.executable, "-c", code],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    finally:
        group.rmdir()
    quota, fix = done.stdout.splitlines()
    assert quota == "1.5 1"
    if len(os.sched_getaffinity(0)) > 1:
        assert fix.startswith("export OMP_NUM_THREADS=1, or fewer")
    assert fix.endswith("|ok")


def test_without_a_quota_nothing_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or with one that is no limit."""
    for quota in (None, 1024.0):
        monkeypatch.setattr(machine, "quota_cores", lambda quota=quota: quota)
        assert machine._cpu({}).status == "ok"


@pytest.mark.parametrize(
    ("threads", "status", "said"),
    [
        ("8", "warning", "OMP_NUM_THREADS=8 is more than that, and all threads stand still"),
        ("0", "warning", "torch starts a thread for each visible one"),
        ("many", "warning", "torch starts a thread for each visible one"),
        ("", "warning", "torch starts a thread for each visible one"),
        ("1", "ok", "the time of 1.5 processors, of 4 that are visible"),
    ],
)
def test_doctor_says_which_threads_are_too_many(
    monkeypatch: pytest.MonkeyPatch, threads: str, status: str, said: str
) -> None:
    """Those that the environment sets, or torch's own number."""
    monkeypatch.setattr(machine, "quota_cores", lambda: 1.5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    found = machine._cpu({"OMP_NUM_THREADS": threads})
    assert (found.status, said in found.what) == (status, True), found.what
