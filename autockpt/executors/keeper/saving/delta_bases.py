"""Sealed images that are durable too: the possible bases of a save.

The bytes of a base come from its slot.  A slot that is wanted for the next snapshot is given up at
once.  Chunks encoded so far keep their base, which is on disk, and the others stand alone.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from autockpt.executors.image.container import ImageIndex
from autockpt.values.generation import Generation


class Base:
    """One image in a slot.  Chunks are borrowed by writers; `let_go` is the keeper's."""

    def __init__(self, image: memoryview, index: ImageIndex, *, bases: int) -> None:
        """`bases`: of itself, in a row, that a reader needs."""
        self.index = index
        self.bases = bases
        self._image = image
        self._borrowed = 0
        self._gone = False
        self._returned = threading.Condition()

    def fits(self, *, run_id: str, image_bytes: int, chunk_bytes: int) -> bool:
        """Whether its chunks are of the same numbers and lengths."""
        mine = (self.index.run_id, self.index.image_bytes, self.index.chunk_bytes)
        return mine == (run_id, image_bytes, chunk_bytes)

    @contextmanager
    def chunk(self, number: int) -> Iterator[memoryview | None]:
        """The raw bytes of a chunk while the context lasts; None when the slot is needed."""
        with self._returned:
            here = not self._gone
            self._borrowed += here
        start, stop = self.index.chunk_range(number)
        try:
            yield self._image[start:stop] if here else None
        finally:
            with self._returned:
                self._borrowed -= here
                self._returned.notify_all()

    def let_go(self) -> None:
        """Return when the slot is not read any more: after one chunk at most."""
        with self._returned:
            self._gone = True
            self._returned.wait_for(lambda: not self._borrowed)
            self._image = memoryview(b"")


class Bases:
    """By rank the newest durable image that is still in its slot."""

    def __init__(self) -> None:
        self._newest: dict[int, Base] = {}

    def add(self, base: Base) -> None:
        """Newer ones take the place of older ones."""
        rank = base.index.rank
        old = self._newest.get(rank)
        if old is None or old.index.generation < base.index.generation:
            self._newest[rank] = base

    def drop(self, base: Base) -> None:
        """Its slot is needed, or its file is damaged."""
        base.let_go()
        if self._newest.get(base.index.rank) is base:
            del self._newest[base.index.rank]

    def for_save(
        self,
        rank: int,
        generation: Generation,
        *,
        run_id: str,
        image_bytes: int,
        chunk_bytes: int,
        longest: int,
    ) -> Base | None:
        """Return a base for a save of this image, if readers need at most `longest` bases.

        An older one is written after a newer one when the end is near: it has no base then.
        """
        base = self._newest.get(rank)
        if base is None or base.bases >= longest or not base.index.generation < generation:
            return None
        alike = base.fits(run_id=run_id, image_bytes=image_bytes, chunk_bytes=chunk_bytes)
        return base if alike else None
