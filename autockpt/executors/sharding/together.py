"""Ranks of one node read a checkpoint together: every chunk once, by one of them, for all.

They share a piece of memory that their keeper made: a table of who needs which chunk, and a ring of
buffers that belong to one rank each.  Whoever has nothing to take reads a chunk that nobody reads
yet, checks it, takes its own part and leaves the chunk in a buffer of its own until all that need
it have taken theirs.  Taking never waits, so nobody waits in a circle.

A chunk is claimed by a lock on one byte of the memory's descriptor, which the kernel opens when a
process dies; everything else in the table is written by one rank only.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from autockpt.executors.memory import PAGE_BYTES, READING_TABLE_BYTES, Arena, page_align
from autockpt.values.errors import StorageError

PATIENCE_S = 120.0
"""Nothing moved for this long: whoever is missing will not come."""
_PAUSE_S = 0.0005
_LEFT = 2
"""Mark of a rank that takes nothing more."""


class ReadTogether:
    """One rank's end.  `chunks`: how many there are in all, numbered alike by all members."""

    def __init__(
        self, arena: Arena, members: Sequence[int], rank: int, *, chunks: int, chunk_bytes: int
    ) -> None:
        """Raises StorageError when the memory is too small for so many or such large chunks."""
        self._arena, self._members = arena, list(members)
        self._me = self._members.index(rank)
        count = len(self._members)
        size = page_align(chunk_bytes)
        self._per_member = (arena.nbytes - READING_TABLE_BYTES) // size // count
        if PAGE_BYTES + chunks * (2 * count + 2) > READING_TABLE_BYTES or self._per_member < 1:
            raise StorageError(f"{chunks} chunks of {chunk_bytes} bytes are too many to share")
        table = np.frombuffer(arena.view, dtype=np.uint8, count=READING_TABLE_BYTES)
        self._marks = table[:count]
        """By member: 0 not here yet, 1 its needs are known, 2 takes nothing more."""
        self._pids = table[1024 : 1024 + 8 * count].view(np.int64)
        start = PAGE_BYTES
        self._needs = table[start : start + count * chunks].reshape(count, chunks)
        start += count * chunks
        self._taken = table[start : start + count * chunks].reshape(count, chunks)
        start += count * chunks + (chunks * count) % 2
        self._places = table[start : start + 2 * chunks].view(np.uint16)
        """By chunk: 0 not read, else 1 + its buffer."""
        self._size = size
        self._begun = np.zeros(chunks, dtype=bool)
        """Chunks that a thread of ours reads or takes, or has."""
        self._mine: dict[int, int] = {}
        """Chunks in buffers of ours."""
        self._lock = threading.Lock()
        self._failed = False
        self._moved = time.monotonic()

    # ------------------------------------------------------------------ coming and going

    def join(self, needed: Sequence[int]) -> None:
        """Says what this rank needs, and waits until all have said so.  Raises StorageError."""
        self._needs[self._me, list(needed)] = 1
        self._pids[self._me] = os.getpid()
        self._marks[self._me] = 1
        deadline = time.monotonic() + PATIENCE_S
        while not all(self._marks):
            if time.monotonic() > deadline:
                missing = [
                    r for r, mark in zip(self._members, self._marks, strict=True) if not mark
                ]
                raise StorageError(f"ranks {missing} did not come to read together")
            time.sleep(_PAUSE_S)
        self._moved = time.monotonic()

    def leave(self) -> None:
        """Nobody waits for this rank any more."""
        self._marks[self._me] = _LEFT

    # ------------------------------------------------------------------ the work

    def run(
        self,
        read: Callable[[int], memoryview],
        put: Callable[[int, memoryview], None],
    ) -> None:
        """One thread of this rank: reads and takes until nothing is left that it needs.

        `read(chunk)` gives its verified bytes, valid until the next call of this thread; `put` may
        be given more than those.  What either raises ends all threads of this rank.
        """
        try:
            self._run(read, put)
        except BaseException:
            self._failed = True
            raise

    def _run(
        self, read: Callable[[int], memoryview], put: Callable[[int, memoryview], None]
    ) -> None:
        while not self._failed:
            chunk, ready = self._next()
            if chunk is None:
                if not self._left():
                    return
                self._require_life()
                time.sleep(_PAUSE_S)
            elif ready:
                put(chunk, self._buffer(int(self._places[chunk]) - 1))
                self._took(chunk)
            else:
                self._read(chunk, read, put)

    def _read(
        self,
        chunk: int,
        read: Callable[[int], memoryview],
        put: Callable[[int, memoryview], None],
    ) -> None:
        try:
            data = read(chunk)
            if self._others(chunk):
                self._keep(chunk, data)
            put(chunk, data)
            self._took(chunk)
        finally:
            self._unlock(chunk)

    def _next(self) -> tuple[int | None, bool]:
        """(chunk to take or to read, it is there already); None: nothing to do now."""
        with self._lock:
            open_ = (self._needs[self._me] == 1) & ~self._begun
            ready = np.flatnonzero(open_ & (self._places != 0))
            if ready.size:
                self._begun[ready[0]] = True
                return int(ready[0]), True
            waiting = np.flatnonzero(open_)
            if not waiting.size:
                return None, False
            # Each begins elsewhere, so that they meet seldom.
            turn = len(self._begun) * self._me // len(self._members)
            start = int(np.searchsorted(waiting, turn))
            for chunk in (int(c) for c in np.concatenate((waiting[start:], waiting[:start]))):
                if not self._room(chunk):
                    return None, False
                if self._claim(chunk):
                    self._begun[chunk] = True
                    return chunk, False
            return None, False

    def _room(self, chunk: int) -> bool:
        """A buffer of ours is free, or nobody else needs the chunk."""
        for held in [c for c in self._mine if not self._others(c)]:
            del self._mine[held]
        return len(self._mine) < self._per_member or not self._others(chunk)

    def _others(self, chunk: int) -> bool:
        """Somebody else needs it, has not taken it and is still there."""
        open_ = (self._needs[:, chunk] == 1) & (self._taken[:, chunk] == 0) & (self._marks == 1)
        open_[self._me] = False
        return bool(open_.any())

    def _keep(self, chunk: int, data: memoryview) -> None:
        """Into a buffer of ours, for the others."""
        with self._lock:
            used = set(self._mine.values())
            buffer = next(b for b in range(self._per_member) if b not in used)
            self._mine[chunk] = buffer
        number = self._me * self._per_member + buffer
        self._buffer(number)[: len(data)] = data
        self._places[chunk] = number + 1

    def _buffer(self, number: int) -> memoryview:
        start = READING_TABLE_BYTES + number * self._size
        return self._arena.view[start : start + self._size]

    def _took(self, chunk: int) -> None:
        self._taken[self._me, chunk] = 1
        self._moved = time.monotonic()

    def _left(self) -> bool:
        """Chunks that we need and have not taken, by any thread of ours."""
        return bool(((self._needs[self._me] == 1) & (self._taken[self._me] == 0)).any())

    # ------------------------------------------------------------------ claims

    def _claim(self, chunk: int) -> bool:
        """Nobody else reads it; it may have become ready meanwhile."""
        assert self._arena.fd is not None
        try:
            fcntl.lockf(self._arena.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, chunk)
        except OSError:
            return False
        if self._places[chunk]:
            self._unlock(chunk)
            return False
        return True

    def _unlock(self, chunk: int) -> None:
        assert self._arena.fd is not None
        fcntl.lockf(self._arena.fd, fcntl.LOCK_UN, 1, chunk)

    def _require_life(self) -> None:
        """Counts the dead as gone.  Raises StorageError when nothing moves."""
        idle = time.monotonic() - self._moved
        if idle < 1.0:
            return
        for member, pid in enumerate(self._pids):
            if self._marks[member] == 1 and not os.path.exists(f"/proc/{pid}"):
                self._marks[member] = _LEFT
        if idle > PATIENCE_S:
            raise StorageError(f"reading together stands still for {idle:.0f} s")
