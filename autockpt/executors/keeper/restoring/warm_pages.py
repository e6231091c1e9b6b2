"""Memory kept for the trainer that comes in the place of one that was lost.

A virtual machine that tells its host which pages are free loses them within seconds, sooner than a
restarted script has made its imports.  It gets them again page by page.  New memory was then first
touched at 0.3-0.7 GB/s, and at 7-13 where the machine still had the pages (measured, KVM).  So the
keeper takes as much as a restore may need as soon as a trainer is lost.  It frees the memory when
the next trainer says hello.

Other processes do not go short of it.  Touched pages are marked as free at once (MADV_FREE), and
the kernel takes them where memory is scarce.
"""

import contextlib
import os
import threading
from pathlib import Path

from autockpt.executors.linux.memory import HUGE_BYTES, Arena, require_headroom
from autockpt.values.errors import GuardError

REPORTING_ORDER = Path("/sys/module/page_reporting/parameters/page_reporting_order")
"""Size of the free blocks that a virtual machine reports to its host; -1: no reports."""
_LOWEST_PRIORITY = 19


def host_takes_free_pages(parameter: Path = REPORTING_ORDER) -> bool:
    """Whether this system is a virtual machine that gives its free memory back."""
    try:
        return 0 <= int(parameter.read_text()) < 64
    except (OSError, ValueError):
        return False


class WarmPages:
    """By rank.  Used by the keeper's thread."""

    def __init__(self, *, needed: bool | None = None) -> None:
        """`needed`: the system does not keep free memory for long; None: ask the system."""
        self._needed = host_takes_free_pages() if needed is None else needed
        self._kept: dict[int, tuple[Arena, threading.Event]] = {}

    def keep(self, rank: int, nbytes: int) -> None:
        """Begins to take so many bytes, in the background; none where they would be missed."""
        self.give_back(rank)
        if not self._needed or not nbytes:
            return
        with contextlib.suppress(GuardError, OSError):
            require_headroom(nbytes, what="memory for the next trainer")
            arena, over = Arena(nbytes), threading.Event()
            self._kept[rank] = arena, over
            work = (arena, arena.view[:], over)
            threading.Thread(target=_touch, args=work, name="autockpt-kept", daemon=True).start()

    def give_back(self, rank: int) -> None:
        """Frees what there is for a rank."""
        if rank in self._kept:
            arena, over = self._kept.pop(rank)
            over.set()
            arena.close()

    def close(self) -> None:
        """Frees all of it."""
        for rank in list(self._kept):
            self.give_back(rank)


def _touch(arena: Arena, held: memoryview, over: threading.Event) -> None:
    """The mapping lives as long as `held`.  A script that starts meanwhile goes first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    for start in range(0, arena.nbytes, HUGE_BYTES):
        if over.is_set():
            break
        arena.touch_spare(start, min(HUGE_BYTES, arena.nbytes - start))
    held.release()
