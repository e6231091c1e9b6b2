"""How much faster pieces of a checkpoint are copied with other settings of the C library.

glibc reads its tunables when a process starts, so each way has a process of its own: this file, run
by itself.  A third of a second in all; 256 MiB for that long.
"""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Mapping

COPIED_BYTES = 128 * 2**20
"""Beyond any core's share of a cache."""
PASSES = 3
"""The fastest counts: a shared machine takes a core away now and then."""
TIMEOUT_S = 10.0


def copy_gain(added: Mapping[str, str], *, piece_bytes: int) -> float | None:
    """Times as fast with `added` in the environment as without; None: it could not be measured."""
    try:
        usual_s = _measured_s(os.environ, piece_bytes)
        return usual_s / _measured_s({**os.environ, **added}, piece_bytes)
    except (OSError, subprocess.SubprocessError, ValueError, ZeroDivisionError):
        return None


def _measured_s(environ: Mapping[str, str], piece_bytes: int) -> float:
    # Nothing but the standard library: a start takes 20 ms.
    command = [sys.executable, "-I", "-S", __file__, str(piece_bytes)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    return float(done.stdout)


def fastest_pass_s(piece_bytes: int, copied_bytes: int = COPIED_BYTES) -> float:
    """Seconds of a copy of all bytes, piece by piece, into memory that was touched before."""
    source, target = (_touched(copied_bytes) for _ in range(2))
    took = []
    for _ in range(PASSES):
        began = time.perf_counter()
        copy(source, target, copied_bytes, piece_bytes)
        took.append(time.perf_counter() - began)
    return min(took)


def copy(source: int, target: int, nbytes: int, piece_bytes: int) -> None:
    """From address to address, as the copy thread does it."""
    for at in range(0, nbytes, piece_bytes):
        ctypes.memmove(target + at, source + at, min(piece_bytes, nbytes - at))


def _touched(nbytes: int) -> int:
    """The address of new memory, which this process keeps."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not everywhere
        memory.madvise(mmap.MADV_HUGEPAGE)  # a hundredth of the faults
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _KEPT.append(memory)
    ctypes.memset(address, 1, nbytes)
    return address


_KEPT: list[mmap.mmap] = []

if __name__ == "__main__":
    print(fastest_pass_s(int(sys.argv[1])))
