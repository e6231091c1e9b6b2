"""Memory for the tensors that a restore makes: new, private, in huge pages, each tensor's own.

The first touch of new memory is what a restore would spend its time on: 2-4 GB/s in small pages,
but nearly the speed of a plain copy in huge ones (measured with two threads, the copy included:
12.5 GB/s against 14).  malloc will not do: the header that it writes in front of every large block
puts the 2 MB around it into small pages.  So the tensors of one restore are carved out of one
mapping by whole pages, and every tensor gives its own pages back when it dies: none keeps another
alive, and `torch.save` of one writes that one.
"""

import ctypes
import math
import mmap
import weakref

import torch

from autockpt.executors.memory import HUGE_BYTES, MADV_HUGEPAGE, page_align

OWN_PAGES_BYTES = 64 * 2**10
"""Smaller tensors come from torch's allocator, which packs them."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class FreshMemory:
    """Room for tensors of these sizes (bytes); nothing of it is there before it is written."""

    def __init__(self, sizes: list[int]) -> None:
        self._left = sum(page_align(size) for size in sizes if size >= OWN_PAGES_BYTES)
        self._next = _map(self._left) if self._left else 0

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor in host memory."""
        nbytes = dtype.itemsize * math.prod(shape)
        room = page_align(nbytes)
        if nbytes < OWN_PAGES_BYTES or room > self._left:
            return torch.empty(shape, dtype=dtype, device="cpu")
        pages = (ctypes.c_char * nbytes).from_address(self._next)
        # Not at exit: tensors may be used to the very end, and the system takes all of it back.
        weakref.finalize(pages, _libc.munmap, self._next, room).atexit = False
        self._next, self._left = self._next + room, self._left - room
        storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, _strides(shape))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides[: len(shape)]))


def _map(nbytes: int) -> int:
    """Address of a new private mapping that starts where a huge page can."""
    size = nbytes + HUGE_BYTES
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
    if found in (None, _FAILED):
        raise MemoryError(f"restore: {nbytes} bytes for the restored tensors cannot be mapped")
    start = -(-found // HUGE_BYTES) * HUGE_BYTES
    for low, high in ((found, start), (start + nbytes, found + size)):
        if high > low:
            _libc.munmap(low, high - low)
    # A kernel without huge pages says no, and small ones do.
    _libc.madvise(start, nbytes, MADV_HUGEPAGE)
    return int(start)
