"""What the kernel counts when it kills for want of memory."""

from pathlib import Path

import pytest

from autockpt.executors.linux.oom_kills import OomKills

V1 = ("memory/pod/job", "memory/pod", "memory.limit_in_bytes", "memory.oom_control", "4:memory")
V2 = ("pod/job", "pod", "memory.max", "memory.events", "0:")


def machine(folder: Path) -> None:
    """A made-up /proc and /sys/fs/cgroup in which no process was killed, with no group."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 5\n")
    (folder / "cgroup").mkdir()


def kills(folder: Path) -> OomKills:
    """As read there."""
    return OomKills.now(proc=folder / "proc", cgroup=folder / "cgroup")


@pytest.mark.parametrize(("own", "parent", "limit", "counter", "line"), [V1, V2])
def test_the_group_whose_limit_was_reached_is_named(
    tmp_path: Path, own: str, parent: str, limit: str, counter: str, line: str
) -> None:
    """A kill that was counted before says nothing."""
    machine(tmp_path)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}:/pod/job\n")
    for name, size in ((own, "max" if line == "0:" else str(2**63 - 4096)), (parent, "2000000000")):
        group = tmp_path / "cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / limit).write_text(size)
        (group / counter).write_text("under_oom 0\noom_kill 3\n")
    before = kills(tmp_path)
    assert kills(tmp_path).since(before) == ""
    (tmp_path / "cgroup" / own / counter).write_text("under_oom 0\noom_kill 4\n")
    assert "a process of this machine" in kills(tmp_path).since(before)
    (tmp_path / "cgroup" / parent / counter).write_text("under_oom 0\noom_kill 4\n")
    said = kills(tmp_path).since(before)
    assert said == f"out of memory: 2 GB are the limit of {tmp_path / 'cgroup' / parent}"


def test_a_kill_of_the_host_is_told_without_groups(tmp_path: Path) -> None:
    """Files that are missing are passed over."""
    machine(tmp_path)
    before = kills(tmp_path)
    (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
    assert "a process of this machine" in kills(tmp_path).since(before)
    (tmp_path / "proc/vmstat").unlink()
    assert kills(tmp_path).since(before) == ""
