"""Work beside the training gives way: its threads ask the kernel for long time slices.

Between threads of one priority Linux hands a core over when a slice ends, and checks that when its
clock ticks.  A training thread that wakes to post a kernel or to pass a message on waits up to 4 ms
behind a copy.  Since Linux 6.12 a thread may ask for slices of its own length, and one that wakes
with a shorter slice goes first at once.  The shares of the core stay what they were.

A lower priority does not help.  A nice'd thread stays behind a busy one although another core is
free, and may hold the interpreter's lock meanwhile.

Source: kernel/sched/fair.c (EEVDF, `PREEMPT_SHORT`), `sched_setattr(2)`; `make bench-timeslice`.
"""

import ctypes
import os
import platform

LONGEST_S = 0.1
"""The kernel's limit."""
_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""(sched_setattr, sched_getattr): glibc has no functions for them before 2.41."""
_OF_FAIR = (os.SCHED_OTHER, os.SCHED_BATCH)

_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    """`struct sched_attr`, its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def ask_for_long_slices() -> bool:
    """Ask for the calling thread and its later threads; True: the kernel gives them.

    Otherwise everything stays as it was.  Kernels older than 6.12 and some containers refuse, and
    threads with another scheduling policy are left alone.
    """
    attributes = _read(0)
    if attributes is None or attributes.policy not in _OF_FAIR:
        return False
    attributes.runtime_ns = int(LONGEST_S * 1e9)
    set_attributes, _ = _NUMBERS[platform.machine()]
    if _libc.syscall(set_attributes, 0, ctypes.byref(attributes), 0):
        return False
    return slice_s() == LONGEST_S


def give_way() -> None:
    """Let threads that wait for this core run first; the interpreter's lock is free meanwhile."""
    _libc.sched_yield()


def slice_s(thread: int = 0) -> float:
    """Length of a thread's slices (0: the calling one's), seconds; 0: the kernel does not say."""
    attributes = _read(thread)
    return 0.0 if attributes is None else attributes.runtime_ns / 1e9


def _read(thread: int) -> _Attributes | None:
    if platform.machine() not in _NUMBERS:
        return None
    attributes, (_, get_attributes) = _Attributes(), _NUMBERS[platform.machine()]
    size = ctypes.sizeof(attributes)
    if _libc.syscall(get_attributes, thread, ctypes.byref(attributes), size, 0):
        return None
    return attributes
