"""Host facts from the files of containers and machines that are not this one."""

import os

import pytest

from autockpt.profiles.probes import host

V1_MOUNTS = """\
30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw
35 30 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 30 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
"""
V2_MOUNTS = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
GIB = 2**30


def reader(files: dict[str, str]) -> host.ReadText:
    """Files that exist only here."""
    return files.get


def test_v2_takes_the_tightest_ancestor() -> None:
    """A limit far above the process binds when less is left there."""
    files = {
        "/sys/fs/cgroup/a/b/memory.max": "max\n",
        "/sys/fs/cgroup/a/b/memory.current": f"{GIB}\n",
        "/sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
        "/sys/fs/cgroup/a/memory.current": f"{6 * GIB}\n",
        "/sys/fs/cgroup/a/memory.stat": f"anon {GIB}\ninactive_file {GIB}\n",
    }
    room = host.cgroup_room("0::/a/b\n", V2_MOUNTS, reader(files))

    assert room is not None
    assert room.limit_bytes == 8 * GIB
    assert room.available_bytes == 3 * GIB, "idle page cache is not used memory"


def test_v1_takes_the_tightest_ancestor() -> None:
    """As v2, with its own file names and the hierarchical page cache."""
    root = "/sys/fs/cgroup/memory"
    files = {
        f"{root}/job/memory.limit_in_bytes": str(4 * GIB),
        f"{root}/job/memory.usage_in_bytes": str(GIB),
        f"{root}/memory.limit_in_bytes": "9223372036854771712",
        f"{root}/memory.usage_in_bytes": str(GIB),
    }
    room = host.cgroup_room("4:memory:/job\n5:cpu:/other\n0::/\n", V1_MOUNTS, reader(files))

    assert room == host.CgroupRoom(limit_bytes=4 * GIB, available_bytes=3 * GIB)


def test_a_container_sees_its_cgroup_at_the_root_of_the_mount() -> None:
    """/proc names the path from the host's root, the mount shows a part of it."""
    mounts = "35 30 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    files = {
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    }
    room = host.cgroup_room("4:memory:/docker/abc\n", mounts, reader(files))

    assert room == host.CgroupRoom(limit_bytes=2 * GIB, available_bytes=GIB)


@pytest.mark.parametrize(
    ("own", "mounts"),
    [("", ""), ("garbage\n", V2_MOUNTS), ("0::/a\n", "garbage\n"), ("0::/a\n", V2_MOUNTS)],
)
def test_no_limit_is_none(own: str, mounts: str) -> None:
    """Unreadable files, unknown lines and "max" mean that no limit is known."""
    assert host.cgroup_room(own, mounts, reader({})) is None


def test_usage_above_the_limit_leaves_nothing() -> None:
    """Never a negative amount."""
    files = {"/sys/fs/cgroup/memory.max": "100", "/sys/fs/cgroup/memory.current": "150"}
    room = host.cgroup_room("0::/\n", V2_MOUNTS, reader(files))

    assert room is not None
    assert room.available_bytes == 0


MOUNTS = """\
1 0 254:0 / / rw - ext4 /dev/vda rw
2 1 0:40 / /scratch rw - tmpfs tmpfs rw
3 1 0:41 / /scratch rw - xfs /dev/nvme0n1 rw
4 1 0:42 / /scratch/with\\040blank rw - nfs4 server:/export rw
5 1 0:43 / /scratchy rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me", "ext4 /dev/vda"),
        ("/scratch/runs", "xfs /dev/nvme0n1"),
        ("/scratch/with blank/x", "nfs4 server:/export"),
        ("/scratchy", "tmpfs tmpfs"),
        ("/scratchier", "ext4 /dev/vda"),
    ],
)
def test_a_path_belongs_to_its_longest_newest_mount(path: str, expected: str) -> None:
    """By whole components; a later mount on the same point hides the earlier."""
    assert str(host.mount_of(path, mounts=MOUNTS)) == expected


def test_this_machine_has_memory_and_an_identity() -> None:
    """The real files of this machine give plausible figures, twice the same."""
    memory = host.memory_headroom()

    assert 0 < memory.host_available_bytes <= memory.host_total_bytes
    assert host.host_identity() == host.host_identity()
    assert os.uname().nodename not in host.host_identity()
    assert host.cpu_name()
    assert host.mount_of("/").kind != "unknown"
