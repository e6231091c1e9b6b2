"""First touch: a copy into memory that was never written, against one into memory that was.

The memory is that of a slot (a sealed memfd), and its pages are given back as a save without
preallocation does.
"""

import ctypes
import time

from autockpt.executors.linux.memory import Arena

PIECE_BYTES = 4 * 2**20
"""Bytes per call, as the copy thread copies."""


def first_touch(nbytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a copy into fresh and into faulted memory, in turn; the first round is dropped."""
    source = Arena.anonymous(nbytes)
    slot = Arena.create_shared(nbytes, name="bench-first-touch")
    fresh, faulted = [], []
    try:
        for _ in range(rounds + 1):
            slot.release_pages()
            fresh.append(_copy_s(source, slot))
            faulted.append(_copy_s(source, slot))
    finally:
        slot.close()
        source.close()
    return fresh[1:], faulted[1:]


def _copy_s(source: Arena, slot: Arena) -> float:
    began = time.perf_counter()
    for start in range(0, slot.nbytes, PIECE_BYTES):
        count = min(PIECE_BYTES, slot.nbytes - start)
        ctypes.memmove(slot.address + start, source.address + start, count)
    return time.perf_counter() - began
