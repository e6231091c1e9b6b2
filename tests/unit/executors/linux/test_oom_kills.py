"""What the kernel counts when it kills for want of memory."""

from pathlib import Path

import pytest

from autockpt.executors.linux.oom_kills import TICK_S, OomKills, OomWatch

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
        (group / counter).write_text("under_oom 0\noom 1\noom_kill 3\n")
    before = kills(tmp_path)
    assert kills(tmp_path).since(before) == ""
    (tmp_path / "cgroup" / own / counter).write_text("under_oom 0\noom 1\noom_kill 4\n")
    group = tmp_path / "cgroup" / own
    assert kills(tmp_path).since(before).endswith(f"killed a process of {group} for it")
    (tmp_path / "cgroup" / parent / counter).write_text("under_oom 0\noom 2\noom_kill 4\n")
    said = kills(tmp_path).since(before)
    assert said == f"out of memory: 2 GB are the limit of {tmp_path / 'cgroup' / parent}"


def groups_v2(folder: Path) -> tuple[Path, Path]:
    """The own group and the one around it, each with a limit."""
    machine(folder)
    (folder / "proc/self/cgroup").write_text("0::/pod/job\n")
    own, around = folder / "cgroup/pod/job", folder / "cgroup/pod"
    own.mkdir(parents=True)
    for group, size in ((own, "1000000000"), (around, "2000000000")):
        (group / "memory.max").write_text(size)
        (group / "memory.events").write_text("oom 0\noom_kill 0\n")
    return own, around


def test_a_limit_that_was_not_reached_is_not_blamed(tmp_path: Path) -> None:
    """A group of v2 counts its victims, whoever ran out of memory."""
    own, around = groups_v2(tmp_path)
    before = kills(tmp_path)
    (own / "memory.events").write_text("oom 0\noom_kill 1\n")
    (around / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert kills(tmp_path).since(before) == f"out of memory: 2 GB are the limit of {around}"
    (around / "memory.events").write_text("oom 0\noom_kill 1\n")
    assert "the limit of" not in kills(tmp_path).since(before)


def test_a_kill_in_a_neighbours_group_is_none_of_ours(tmp_path: Path) -> None:
    """The group around both counts it, and so does the host."""
    _, around = groups_v2(tmp_path)
    before = kills(tmp_path)
    (around / "memory.events").write_text("oom 1\noom_kill 1\n")
    (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
    assert kills(tmp_path).since(before) == ""


def test_a_kill_of_the_host_is_told_without_groups(tmp_path: Path) -> None:
    """As a guess: it may have been any process.  Files that are missing are passed over."""
    machine(tmp_path)
    before = kills(tmp_path)
    (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
    said = kills(tmp_path).since(before)
    assert said == "perhaps: the kernel killed a process of this machine for want of memory"
    (tmp_path / "proc/vmstat").unlink()
    assert kills(tmp_path).since(before) == ""


def test_only_a_kill_of_the_last_moments_explains_a_death(tmp_path: Path) -> None:
    """One of days ago does not; one just before the newest tick does."""
    machine(tmp_path)
    now_s = 0.0
    watch = OomWatch(lambda: kills(tmp_path), lambda: now_s)
    (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
    assert watch.killed()
    now_s += TICK_S
    watch.tick()
    watch.tick()
    assert watch.killed()
    now_s += TICK_S
    watch.tick()
    assert watch.killed() == ""
    (tmp_path / "proc/vmstat").write_text("oom_kill 7\n")
    assert watch.killed()
    watch.begin()
    assert watch.killed() == ""
