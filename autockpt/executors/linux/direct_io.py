"""The direct I/O alignment of a file system: statx(STATX_DIOALIGN), Linux 6.1 and newer.

It states the alignment of memory and of offsets, which is larger than a page on disks with large
sectors.  0 means that it takes no direct I/O for this file.  Many say nothing; there trying is all
that is left.
"""

import ctypes
from functools import cache

from autockpt.executors.linux.memory import PAGE_BYTES

_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000


def stated_alignment(descriptor: int) -> tuple[int, int] | None:
    """(memory, offset) alignment in bytes for a regular file; None: nothing is stated."""
    buffer = ctypes.create_string_buffer(256)
    try:
        result = _libc().statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer)
    except AttributeError:
        return None
    mask = int.from_bytes(buffer.raw[0:4], "little")
    if result != 0 or not mask & _STATX_DIOALIGN:
        return None
    memory = int.from_bytes(buffer.raw[152:156], "little")
    return memory, int.from_bytes(buffer.raw[156:160], "little")


def objection(descriptor: int) -> str:
    """Why images, aligned to PAGE_BYTES, take no direct I/O to this file; "": they may."""
    stated = stated_alignment(descriptor)
    if stated is None:
        return ""
    if not all(stated):
        return "the file system states that it takes no direct I/O"
    if all(PAGE_BYTES % alignment == 0 for alignment in stated):
        return ""
    return (
        f"the file system states an alignment of {stated[0]} B for memory and {stated[1]} B for "
        f"offsets, images have {PAGE_BYTES} B"
    )


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
