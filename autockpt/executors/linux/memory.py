"""Host memory that outlives a process: sealed memfds, faulted once, never freed while in use.

A memfd has no name, so nothing leaks and no mount limits it; it lives as long as one process holds
its descriptor.  Fresh pages cost 5-8 times a copy into faulted ones (measured: 1.5-2.4 GB/s against
12.5).  So the keeper allocates and faults slots once, after it has read the headroom.  Beyond a
cgroup limit an allocation is an OOM kill and not an error.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autockpt import new_files
from autockpt.executors.image.layout.room import reserve_bytes
from autockpt.values.errors import GuardError, NoRoomError
from autockpt.values.units import format_bytes

PAGE_BYTES = 4096
HUGE_BYTES = 2 * 2**20

_MADV_FREE, _MADV_REMOVE, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 8, 9, 14, 23, 25
_MAP_FIXED = 0x10
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS = 1033
_SEALS = 0x0001 | 0x0002 | 0x0004  # SEAL, SHRINK, GROW: nobody can truncate a mapped slot (SIGBUS)

_libc = ctypes.CDLL(None, use_errno=True)
# Without these a length is cut to 32 bits: a slot of 4 GiB would be "faulted" with a length of 0.
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_MAP_FAILED = ctypes.c_void_p(-1).value

_FAULT_STEP_BYTES = 64 * 2**20
"""Faulted in steps so that a cgroup limit reached by others in between is noticed.  Smaller ones
would wait for the interpreter's lock each time."""


def page_align(count: int) -> int:
    """`count` rounded up to whole pages."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES


READING_TABLE_BYTES = 4 * 2**20
"""Bytes of the table in the memory in which a node's ranks read together: the chunks that each rank
needs and has."""
READING_HUGE_MARK = PAGE_BYTES - 1
"""Byte of that table which is 1 when all that stands behind the table is in huge pages."""


class Arena:
    """A mapping of private or shared memory with its address; `view` is writable bytes.

    The mapping lives as long as a view of it exists.  From 2 MiB on it starts where a huge page
    can.
    """

    def __init__(self, nbytes: int, *, fd: int | None = None, huge: bool = True) -> None:
        """Maps `nbytes` of the memfd `fd`, or new private memory.  Raises OSError.

        `huge`: in huge pages where the system gives them, so that one byte may take 2 MiB.
        """
        self.fd = fd
        """Descriptor of the memfd behind it, None for private memory."""
        self.nbytes = nbytes
        self._unpin: list[Callable[[], bool]] = []
        self.address = map_memory(nbytes, fd, huge=huge)
        block = (ctypes.c_char * nbytes).from_address(self.address)
        # Not at exit: threads may copy to the very end, and the system takes all of it back.
        end = weakref.finalize(block, _end_mapping, self.address, nbytes, self._unpin)
        end.atexit = False
        self.view = memoryview(block).cast("B")

    @property
    def pinned(self) -> bool:
        """Registered with a device: its pages must stay where they are."""
        return bool(self._unpin)

    def pin(self, unpin: Callable[[], bool]) -> None:
        """It was registered with a device; `unpin` ends that, and is called before it is unmapped.

        False: the device still has it, so that nothing else may be mapped there.
        """
        self._unpin.append(unpin)

    @classmethod
    def anonymous(cls, nbytes: int) -> "Arena":
        """Private, page-aligned, faulted memory, in huge pages where it is large enough.

        A direct read into huge pages takes a few long requests.  The same read into scattered small
        pages ran at half the speed (measured: 1.3 against 2.6 GB/s, virtio disk, 8 MiB).
        """
        arena = cls(max(PAGE_BYTES, page_align(nbytes)))
        arena.fault()
        return arena

    @classmethod
    def create_shared(cls, nbytes: int, *, name: str, limit_bytes: int | None = None) -> "Arena":
        """A new sealed memfd of at least `nbytes`, faulted.

        Raises GuardError when the memory is not there, before anything is allocated.  A single
        page is always: without its board a trainer could not say that there are no slots.
        """
        size = max(PAGE_BYTES, page_align(nbytes))
        if size > PAGE_BYTES:
            require_headroom(size, what=name, limit_bytes=limit_bytes)
        return cls._shared(size, name, fault=True)

    @classmethod
    def create_sparse(cls, nbytes: int, *, name: str, huge: bool = True) -> "Arena":
        """A new sealed memfd of at least `nbytes`, which takes memory where it is written.

        A writer calls `require_headroom` before.  `huge`: as of `Arena`.
        """
        return cls._shared(max(PAGE_BYTES, page_align(nbytes)), name, fault=False, huge=huge)

    @classmethod
    def _shared(cls, size: int, name: str, *, fault: bool, huge: bool = True) -> "Arena":
        fd = create_memfd(name)
        try:
            os.ftruncate(fd, size)
            seal(fd)
            arena = cls(size, fd=fd, huge=huge)
            for start in range(0, size if fault else 0, _FAULT_STEP_BYTES):
                arena._allocate(start, min(_FAULT_STEP_BYTES, size - start))
            return arena
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError) and error.errno == errno.EFBIG:
                needs = f"{name}: needs {format_bytes(size)} of shared memory, which is a file"
                raise GuardError(f"{needs}: {new_files.size_limit_advice()}") from error
            raise

    @classmethod
    def attach(cls, fd: int, *, fault: bool = True, huge: bool = True) -> "Arena":
        """Maps an existing memfd and takes over its descriptor; `fault`: fills its page table."""
        arena = cls(os.fstat(fd).st_size, fd=fd, huge=huge)
        if fault:
            arena.fault()
        return arena

    def fault(self) -> None:
        """Fills the page table of this mapping; a kernel without the call faults on first touch.

        It goes in steps, because other threads that map memory in this process wait for one step.
        """
        for start in range(0, self.nbytes, _FAULT_STEP_BYTES):
            count = min(_FAULT_STEP_BYTES, self.nbytes - start)
            self._advise(_MADV_POPULATE_WRITE, start, count)

    def _allocate(self, start: int, count: int) -> None:
        """New pages for a part of a memfd, huge ones where the system gives them at once."""
        assert self.fd is not None
        if self._advise(_MADV_POPULATE_WRITE, start, count):
            os.posix_fallocate(self.fd, start, count)  # an old kernel, or the reason why not

    def make_huge(self, start: int, count: int) -> bool:
        """Gathers a part into huge pages where the system finds them; bytes stay what they are.

        True when all whole ones in it are.
        """
        return not self._advise(_MADV_COLLAPSE, start, count // HUGE_BYTES * HUGE_BYTES)

    def touch_spare(self, start: int, count: int) -> None:
        """New pages for a part of private memory, which the kernel may take back when it likes."""
        # A write and not madvise, beside which nobody else could map memory.
        ctypes.memset(self.address + start, 0, count)
        self._advise(_MADV_FREE, start, count)

    def _advise(self, advice: int, start: int, count: int) -> bool:
        """True where the kernel says no.  Through ctypes because that releases the GIL."""
        return bool(count and _libc.madvise(self.address + start, count, advice))

    def release_pages(self, start: int = 0, count: int | None = None) -> None:
        """Gives whole pages of a memfd back to the system; the next touch allocates again."""
        self._advise(_MADV_REMOVE, start, self.nbytes - start if count is None else count)

    def let_go(self) -> None:
        """Close the descriptor; the mapping lives as long as a thread copies into it."""
        if self.fd is not None:
            with contextlib.suppress(OSError):  # a script may have closed all that were open
                os.close(self.fd)
            self.fd = None

    def close(self) -> None:
        """Closes, and unmaps unless a view is still held elsewhere."""
        with contextlib.suppress(BufferError):
            self.view.release()
        self.let_go()


def create_memfd(name: str) -> int:
    """A new memfd of no size yet, which can be sealed.  Raises OSError.

    By libc: a Python that was built for old systems (conda's, uv's) has no os.memfd_create.
    """
    fd = int(_libc.memfd_create(os.fsencode(name), _MFD_CLOEXEC | _MFD_ALLOW_SEALING))
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"memfd_create: {os.strerror(ctypes.get_errno())}")
    return new_files.clear_of_scripts(fd)


def seal(fd: int) -> None:
    """Fix the size of a memfd for ever.  Raises OSError."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)


def memory_to_read_in(ranks: int) -> Arena:
    """Where so many ranks read together: a table, and four usual chunks for each.

    The pages are huge where the system gives them, which takes a while.  A direct read into small
    ones ran at a third of the speed (measured: 0.9 against 2.8 GB/s, virtio disk, 8 MiB).  With two
    chunks for each, four ranks on two cores took twice as long (measured: 1.3 against 0.57 s).
    Raises GuardError or OSError when the memory is not there.
    """
    nbytes = 32 * ranks * 2**20
    arena = Arena.create_shared(READING_TABLE_BYTES + nbytes, name="autockpt-reading")
    arena.view[READING_HUGE_MARK] = arena.make_huge(READING_TABLE_BYTES, nbytes)
    return arena


def gather_pages(arenas: Sequence[Arena]) -> None:
    """Makes huge pages of the small ones of shared memory, in the background, also while in use.

    Most systems give shared memory small pages (`shmem_enabled` is "never").  Measured (`make
    bench-pages`): a copy into huge ones takes 0.76 of the time, a digest 0.56.  A direct write
    takes 0.44 of the time and 0.13 of the CPU; mapping it once more takes 0.005.  Gathering takes 3
    to 4 s/GB, mostly waiting: too long to wait for.  Pages that a device has registered stay as
    they are.
    """
    held = [(arena, arena.view[:0]) for arena in arenas if arena.nbytes >= HUGE_BYTES]
    if held:
        threading.Thread(target=_gather, args=(held,), name="autockpt-pages", daemon=True).start()


def _gather(held: list[tuple[Arena, memoryview]]) -> None:
    """Each mapping lives as long as its view."""
    while held:
        arena, view = held.pop()
        for start in range(0, arena.nbytes, _FAULT_STEP_BYTES):
            if arena.fd is None:
                break  # closed
            arena.make_huge(start, min(_FAULT_STEP_BYTES, arena.nbytes - start))
        view.release()


def map_memory(nbytes: int, fd: int | None = None, *, huge: bool = True) -> int:
    """Address of a new mapping of a memfd, or of private memory; `unmap_memory` ends it.

    From 2 MiB on it starts where a huge page can, and asks for huge pages if `huge`.  Raises
    OSError.
    """
    if nbytes < HUGE_BYTES:
        return _mmap(None, nbytes, fd)
    room = nbytes + HUGE_BYTES
    found = _mmap(None, room)
    start = -(-found // HUGE_BYTES) * HUGE_BYTES
    end = start + page_align(nbytes)
    for low, high in ((found, start), (end, found + page_align(room))):
        if high > low:
            unmap_memory(low, high - low)
    if fd is not None:
        _mmap(start, nbytes, fd)
    # A kernel without huge pages says no, and small ones do.
    if huge:
        _libc.madvise(start, nbytes, _MADV_HUGEPAGE)
    return start


def _end_mapping(address: int, nbytes: int, unpin: list[Callable[[], bool]]) -> None:
    if all(end() for end in unpin):
        unmap_memory(address, nbytes)


def unmap_memory(address: int, nbytes: int) -> None:
    """Gives a mapping, or whole pages of it, back to the system."""
    _libc.munmap(address, nbytes)


def _mmap(address: int | None, nbytes: int, fd: int | None = None) -> int:
    """`address`: within a mapping that it replaces, None for anywhere."""
    kind = mmap.MAP_SHARED if fd is not None else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if address is not None:
        kind |= _MAP_FIXED
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = _libc.mmap(address, nbytes, access, kind, -1 if fd is None else fd, 0)
    if found in (None, _MAP_FAILED):
        reason = os.strerror(ctypes.get_errno())
        raise OSError(ctypes.get_errno(), f"{format_bytes(nbytes)} cannot be mapped: {reason}")
    return int(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """Memory that may still be allocated on this node, and the limit that binds."""

    available_bytes: int
    binding: str
    limited: bool = False
    """A control group binds, beyond which an allocation is an OOM kill."""

    def beside_reserve(self, *, swing_bytes: int = 0) -> int:
        """Bytes that may be taken; a training in a control group keeps what it swings by."""
        swing = swing_bytes if self.limited else 0
        return self.available_bytes - reserve_bytes(self.available_bytes, swing_bytes=swing)


def headroom(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Headroom:
    """The smallest of MemAvailable and what every cgroup above this process has left."""
    best = Headroom(available_bytes=_mem_available(proc), binding="MemAvailable of the host")
    for directory, limit, usage in _cgroup_levels(proc, cgroup):
        left = limit - usage
        if left < best.available_bytes:
            binding = f"memory limit of cgroup {directory}"
            best = Headroom(available_bytes=left, binding=binding, limited=True)
    return best


def require_headroom(nbytes: int, *, what: str, limit_bytes: int | None = None) -> None:
    """Raises GuardError when `nbytes` are beyond `limit_bytes`, NoRoomError when they do not fit
    beside the reserve."""
    if limit_bytes is not None and nbytes > limit_bytes:
        raise GuardError(
            f"{what}: needs {format_bytes(nbytes)} of host memory, the policy allows "
            f"{format_bytes(limit_bytes)}; raise limits.host_memory or lower memory.slots"
        )
    room = headroom()
    if nbytes > room.beside_reserve():
        raise NoRoomError(
            f"{what}: needs {format_bytes(nbytes)} of host memory beside a reserve of "
            f"{format_bytes(reserve_bytes(room.available_bytes))}, but {room.binding} has "
            f"{format_bytes(room.available_bytes)} left; free memory, or raise that limit"
        )


def swing_bytes(*, proc: Path = Path("/proc")) -> int:
    """By how much this process has used more memory than now; 0 where the system does not tell."""
    sizes = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmHWM", "VmRSS"):
                sizes[name] = int(value.split()[0]) * 1024
    return max(0, sizes.get("VmHWM", 0) - sizes.get("VmRSS", 0))


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62


def _cgroup_levels(proc: Path, root: Path) -> list[tuple[str, int, int]]:
    """(directory, limit, usage) of every memory cgroup above this process, v1 and v2."""
    levels: list[tuple[str, int, int]] = []
    for directory, names in memory_groups(proc, root):
        level = _read_level(directory, names.limit, names.usage, names.cache)
        if level is not None:
            levels.append((str(directory), *level))
    return levels


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """Names in the directory of a memory cgroup: files, and a line of memory.stat."""

    limit: str
    usage: str
    cache: str
    kills: str
    """Has a line `oom_kill N`, of processes in the group."""
    reached: str
    """Its line of the times that this group's own limit was reached; v1 counts only kills."""


V1 = GroupFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control",
    "oom_kill",
)  # fmt: skip
V2 = GroupFiles("memory.max", "memory.current", "inactive_file", "memory.events", "oom")


def memory_groups(proc: Path, root: Path) -> list[tuple[Path, GroupFiles]]:
    """Every memory cgroup above this process, v1 and v2, the innermost first."""
    found: list[tuple[Path, GroupFiles]] = []
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, V2
        elif "memory" in controllers.split(","):
            base, names = root / "memory", V1
        else:
            continue
        directory = base / path.lstrip("/")
        while True:
            found.append((directory, names))
            if directory == base or base not in directory.parents:
                break
            directory = directory.parent
    return found


def _read_level(
    directory: Path, limit_name: str, usage_name: str, cache_name: str
) -> tuple[int, int] | None:
    """(limit, usage); page cache that the kernel takes back at once is no usage."""
    try:
        limit = (directory / limit_name).read_text().strip()
        usage = int((directory / usage_name).read_text())
        if limit == "max" or int(limit) >= 2**60:
            return None
        return int(limit), max(0, usage - _cache_bytes(directory, cache_name))
    except (OSError, ValueError):
        return None


def _cache_bytes(directory: Path, name: str) -> int:
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name} "))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
