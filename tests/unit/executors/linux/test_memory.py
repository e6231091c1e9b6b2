"""Host memory: refused before it is allocated, sealed, alive while one process holds it."""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch

from autockpt.executors.image.layout.room import RESERVE_BYTES
from autockpt.executors.keeper.slots import BOARD_BYTES
from autockpt.executors.linux import memory
from autockpt.executors.linux.memory import (
    HUGE_BYTES,
    PAGE_BYTES,
    Arena,
    Headroom,
    gather_pages,
    headroom,
    page_align,
    require_headroom,
)
from autockpt.values.errors import GuardError
from tests.contracts.faults import open_descriptors

GIB = 2**30


def machine(
    folder: Path, *, available: int, cgroups: dict[str, dict[str, object]], own: str
) -> tuple[Path, Path]:
    """A made-up /proc and /sys/fs/cgroup; files by directory."""
    proc, root = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(own)
    for name, files in cgroups.items():
        directory = root / name
        directory.mkdir(parents=True, exist_ok=True)
        for file, value in files.items():
            (directory / file).write_text(f"{value}\n")
    return proc, root


V2 = {
    "job/worker": {"memory.max": "max", "memory.current": 3 * GIB},
    "job": {"memory.max": 8 * GIB, "memory.current": 5 * GIB},
}
V1 = {
    "memory/job": {"memory.limit_in_bytes": 8 * GIB, "memory.usage_in_bytes": 6 * GIB},
    "memory": {"memory.limit_in_bytes": 2**63 - 4096, "memory.usage_in_bytes": GIB},
}


@pytest.mark.parametrize(
    ("cgroups", "own", "available", "binding"),
    [
        (V2, "0::/job/worker\n", 3 * GIB, "/job"),
        (V1, "4:memory:/job\n0::/\n", 2 * GIB, "memory/job"),
        (V1, "4:cpu,memory:/job/gone\n", 2 * GIB, "memory/job"),
        ({}, "0::/\n", 20 * GIB, "MemAvailable"),
        ({}, "", 20 * GIB, "MemAvailable"),
        (
            {"job": {"memory.max": "unreadable", "memory.current": "x"}},
            "0::/job\n",
            20 * GIB,
            "Mem",
        ),
    ],
    ids=["v2 parent", "v1", "v1 namespace", "no limit", "no cgroup", "nonsense"],
)
def test_the_smallest_limit_above_the_process_binds(
    tmp_path: Path, cgroups: dict[str, dict[str, object]], own: str, available: int, binding: str
) -> None:
    """Every ancestor counts, in both hierarchies."""
    proc, root = machine(tmp_path, available=20 * GIB, cgroups=cgroups, own=own)
    room = headroom(proc=proc, cgroup=root)
    assert room.available_bytes == available
    assert binding in room.binding


def test_a_scarce_host_binds_below_a_generous_cgroup(tmp_path: Path) -> None:
    """The other way round."""
    proc, root = machine(tmp_path, available=GIB, cgroups=V2, own="0::/job/worker\n")
    assert headroom(proc=proc, cgroup=root).available_bytes == GIB


@pytest.mark.parametrize(
    ("cgroups", "own", "name"),
    [(V2, "0::/job\n", "inactive_file"), (V1, "4:memory:/job\n", "total_inactive_file")],
)
def test_page_cache_that_is_taken_back_at_once_is_no_usage(
    tmp_path: Path, cgroups: dict[str, dict[str, object]], own: str, name: str
) -> None:
    """A job that reads its data set fills its cgroup with cache and still has room for slots."""
    where = "memory/job" if "memory" in own else "job"
    stat = {where: {**cgroups[where], "memory.stat": f"anon 1\n{name} {GIB}\nother 7"}}
    proc, root = machine(tmp_path, available=20 * GIB, cgroups={**cgroups, **stat}, own=own)
    left = 8 * GIB - (5 if where == "job" else 6) * GIB + GIB
    assert headroom(proc=proc, cgroup=root).available_bytes == left


def test_an_allocation_without_room_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond a cgroup limit an allocation is an OOM kill: no memfd is even made."""
    monkeypatch.setattr(
        memory,
        "headroom",
        lambda: Headroom(available_bytes=4 * RESERVE_BYTES + 8191, binding="a limit"),
    )

    def never(*_: object) -> int:
        raise AssertionError("allocated")

    monkeypatch.setattr(memory, "create_memfd", never)
    before = open_descriptors()
    nbytes = 3 * RESERVE_BYTES + 8192
    with pytest.raises(GuardError, match=r"slot: needs 1\.61 GB .* reserve of 537 MB, but a limit"):
        Arena.create_shared(nbytes, name="slot")
    assert open_descriptors() <= before


def test_a_board_is_made_however_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that is too small for slots is none that is too small for the training."""
    none = Headroom(available_bytes=0, binding="a limit")
    monkeypatch.setattr(memory, "headroom", lambda: none)
    Arena.create_shared(BOARD_BYTES, name="board").close()


def test_the_policys_limit_is_kept_whatever_the_host_has() -> None:
    """host_memory is a promise."""
    with pytest.raises(GuardError, match=r"the policy allows 1 MB; raise limits\.host_memory"):
        require_headroom(2_000_000, what="slots", limit_bytes=1_000_000)
    require_headroom(1000, what="slots", limit_bytes=1000)


def test_a_failed_allocation_closes_its_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host lied about its memory."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(Arena, "_advise", lambda *_: True)  # the kernel says no
    before = open_descriptors()
    with pytest.raises(OSError, match="No space left"):
        Arena.create_shared(2**16, name="slot")
    assert open_descriptors() <= before


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 10**6])
def test_arenas_are_whole_zeroed_writable_pages(nbytes: int) -> None:
    """Both kinds."""
    for arena in (Arena.anonymous(nbytes), Arena.create_shared(nbytes, name="slot")):
        assert arena.nbytes == len(arena.view) == page_align(nbytes)
        assert arena.address % PAGE_BYTES == 0
        assert not any(arena.view[:: PAGE_BYTES // 2])
        arena.view[-1] = 7
        arena.close()


def test_nobody_can_truncate_a_slot() -> None:
    """A truncated mapping is SIGBUS in the training: no shrinking, growing, unsealing."""
    arena = Arena.create_shared(2 * PAGE_BYTES, name="slot")
    assert arena.fd is not None
    for size in (0, PAGE_BYTES, 3 * PAGE_BYTES):
        with pytest.raises(PermissionError, match="not permitted"):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError, match="not permitted"):
        fcntl.fcntl(arena.fd, 1033, 0x0008)  # F_ADD_SEALS: the set of seals is sealed too
    assert not os.get_inheritable(arena.fd)
    arena.close()


def test_the_content_survives_any_one_of_its_holders() -> None:
    """Keeper, trainer and launcher each hold a descriptor; the last one keeps the bytes."""
    keeper = Arena.create_shared(PAGE_BYTES, name="slot")
    assert keeper.fd is not None
    trainer = Arena.attach(os.dup(keeper.fd))
    trainer.view[:5] = b"state"
    keeper.close()
    assert bytes(trainer.view[:5]) == b"state"
    assert trainer.fd is not None
    successor = Arena.attach(os.dup(trainer.fd))
    trainer.close()
    assert bytes(successor.view[:5]) == b"state"
    successor.close()


def test_released_pages_read_as_zeros_and_can_be_used_again() -> None:
    """For slots that are not preallocated."""
    arena = Arena.create_shared(4 * PAGE_BYTES, name="slot")
    arena.view[:5] = b"state"
    arena.release_pages()
    assert bytes(arena.view[:5]) == bytes(5)
    arena.view[:5] = b"again"
    assert bytes(arena.view[:5]) == b"again"
    arena.close()


def test_closing_an_arena_that_is_looked_at_is_no_error() -> None:
    """The view keeps the mapping alive; the descriptor is closed all the same, once."""
    before = open_descriptors()
    arena = Arena.create_shared(PAGE_BYTES, name="slot")
    tensor = torch.frombuffer(arena.view, dtype=torch.uint8)
    piece = arena.view[10:20]
    arena.close()
    tensor[10] = 3
    assert piece[0] == 3
    arena.close()
    del tensor, piece, arena  # Python's mmap keeps a descriptor of its own until the mapping goes
    assert open_descriptors() <= before


def test_what_is_no_memory_cannot_be_attached() -> None:
    """An empty file, a pipe."""
    empty = os.memfd_create("empty")
    reading, writing = os.pipe()
    for fd in (empty, reading, writing):
        with pytest.raises((OSError, ValueError), match=r"mmap|device|empty|Invalid|denied"):
            Arena.attach(fd)
        os.close(fd)


def test_pages_are_really_shared() -> None:
    """Another mapping of the descriptor sees every write."""
    arena = Arena.create_shared(PAGE_BYTES, name="slot")
    assert arena.fd is not None
    with mmap.mmap(arena.fd, PAGE_BYTES) as other:
        arena.view[100] = 9
        assert other[100] == 9
    arena.close()


@pytest.mark.parametrize("nbytes", [HUGE_BYTES, 3 * HUGE_BYTES + 5])
def test_large_memory_starts_where_a_huge_page_can(nbytes: int) -> None:
    """Both kinds; writable to the end, and gone after `close`."""
    for arena in (Arena.anonymous(nbytes), Arena.create_shared(nbytes, name="slot")):
        assert arena.address % HUGE_BYTES == 0
        assert arena.nbytes == len(arena.view) == page_align(nbytes)
        arena.view[0] = arena.view[-1] = 7
        address = arena.address
        assert _mapped(address)
        arena.close()
        assert not _mapped(address)


def test_memory_with_holes_may_ask_for_small_pages() -> None:
    """Else one byte of it may take 2 MiB."""
    arena = Arena.create_sparse(3 * HUGE_BYTES, name="record", huge=False)
    other = Arena.attach(os.dup(arena.fd or -1), fault=False, huge=False)
    slot = Arena.create_sparse(3 * HUGE_BYTES, name="window")
    asks = [_smaps(one.address, "VmFlags").split() for one in (arena, other, slot)]
    if "hg" in asks[2]:  # a kernel with huge pages
        assert "hg" not in asks[0]
        assert "hg" not in asks[1]
    for one in (arena, other, slot):
        one.close()


def test_a_mapping_lives_as_long_as_its_last_view() -> None:
    """Whoever still reads a closed slot reads bytes and no hole."""
    arena = Arena.create_shared(HUGE_BYTES, name="slot")
    arena.view[5] = 7
    part, address = arena.view[4:6], arena.address
    arena.close()
    assert part[1] == 7
    part.release()
    del arena, part
    assert not _mapped(address)


def test_pages_are_gathered_while_they_are_in_use() -> None:
    """Huge ones where the kernel can; to the byte what was written before and meanwhile."""
    arena = Arena.create_shared(8 * HUGE_BYTES + PAGE_BYTES, name="slot")
    pattern = bytes(range(256)) * (PAGE_BYTES // 256)
    gather_pages([arena])
    for start in range(0, arena.nbytes, PAGE_BYTES):
        arena.view[start : start + PAGE_BYTES] = pattern
    for thread in threading.enumerate():
        if thread.name == "autockpt-pages":
            thread.join()
    assert arena.view == pattern * (arena.nbytes // PAGE_BYTES)
    if _collapses():
        assert _huge_bytes(arena.address) >= 7 * HUGE_BYTES
    arena.close()


def _collapses() -> bool:
    """Whether this kernel makes huge pages of shared memory on request (Linux 6.1)."""
    probe = Arena.create_shared(HUGE_BYTES, name="probe")
    probe.make_huge(0, HUGE_BYTES)
    found = _huge_bytes(probe.address) > 0
    probe.close()
    return found


def _mapped(address: int) -> bool:
    return any(
        low <= address < high
        for low, high in (
            (int(x, 16) for x in line.split()[0].split("-"))
            for line in Path("/proc/self/maps").read_text().splitlines()
        )
    )


def _huge_bytes(address: int) -> int:
    """Of the mapping that starts there, in huge pages of shared memory."""
    return int(_smaps(address, "ShmemPmdMapped").split()[1]) * 1024


def _smaps(address: int, name: str) -> str:
    """A line about the mapping that starts there."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(x for x in lines if x.startswith(name))
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_lengths_beyond_four_gib_reach_the_kernel_whole() -> None:
    """ctypes cuts an undeclared integer to 32 bits, and a call with length 0 succeeds."""
    calls = []
    arena = Arena.anonymous(PAGE_BYTES)
    arena.nbytes = 2**32

    @ctypes.CFUNCTYPE(ctypes.c_int, *memory._libc.madvise.argtypes)
    def madvise(address: int, length: int, advice: int) -> int:
        calls.append((address, length, advice))
        return 0

    madvise(ctypes.c_void_p(arena.address), arena.nbytes, 23)
    assert calls == [(arena.address, 2**32, 23)]
    arena.close()
