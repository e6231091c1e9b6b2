"""Where no image fits in memory: chunks leave it as soon as they are digested and written.

The slot of a streamed image is as large as the image and takes memory where it is written.  The
trainer keeps within its window of returned memory, which the board reports.  The page with the
header stays to the end, because it is written last.
"""

import threading
from collections.abc import Callable

from autockpt.executors.image.nan_check import NanScan
from autockpt.executors.linux.memory import PAGE_BYTES, Arena


class Drain:
    """Of one streamed image; used by the threads of its pipeline."""

    def __init__(
        self,
        arena: Arena,
        *,
        image_bytes: int,
        chunk_bytes: int,
        beyond: int,
        told: Callable[[int], None],
    ) -> None:
        """`told` hears the prefix of the image that was given back; `beyond`: where the boundary
        group ends, whose numbers are not judged."""
        self._arena, self._told = arena, told
        self._held = arena.view[:0]  # the mapping stays while this lasts
        self._image_bytes, self._chunk_bytes = image_bytes, chunk_bytes
        self._scan = NanScan(image_bytes, beyond=beyond)
        self._lock = threading.Lock()
        self._waiting: set[int] = set()
        """Chunks that are written, while one before them is not."""
        self._next = 0
        self._stopped = False

    @property
    def sick(self) -> str:
        """The first tensor with a NaN, or empty."""
        return self._scan.found

    def look(self, start: int, data: memoryview) -> None:
        """At the bytes from `start` on, while they are there; chunks come in order."""
        self._scan.take(start, data)

    def done(self, index: int) -> None:
        """A chunk is written, or never will be: its memory goes back."""
        with self._lock:
            if self._stopped:
                return
            self._waiting.add(index)
            first = self._next
            while self._next in self._waiting:
                self._waiting.discard(self._next)
                self._next += 1
            if self._next == first:
                return
            start = max(PAGE_BYTES, first * self._chunk_bytes)
            stop = min(self._next * self._chunk_bytes, self._image_bytes)
            if stop > start:
                self._arena.release_pages(start, stop - start)
            self._told(stop)

    def stop(self) -> None:
        """Nothing is given back or told any more: another image may come."""
        with self._lock:
            self._stopped = True
