"""Ranks of one node read a checkpoint together: every chunk once, by one of them, for all.

They share a piece of memory that their keeper made.  It has a table of the chunks that each rank
needs, and a ring of buffers for each rank.  A reading thread takes a chunk that no rank reads yet
into a buffer of its rank, checks it, and tells the other ranks.  The chunk stays there until every
rank that needs it has copied its parts.  While no buffer is free, reading threads copy as well.
One thread of each rank only copies, so that storage waits for no copy and no rank for another
rank's copy.  Copying never waits, so there is no circular wait.

A rank claims a chunk by a lock on one byte of the memory's descriptor, which the kernel releases
when the process dies.  Everything else in the table has a single writing rank.  As long as it lives
a rank holds one more lock, by which the others know that it does.

No rank depends on the others: when nothing moves any more, a rank reads the rest by itself.
"""

import fcntl
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autockpt.executors.linux.cores import usable_cores
from autockpt.executors.linux.memory import (
    PAGE_BYTES,
    READING_HUGE_MARK,
    READING_TABLE_BYTES,
    Arena,
    page_align,
)
from autockpt.executors.storage.shard_file import run_parallel
from autockpt.values.errors import StorageError

PATIENCE_S = 120.0
"""After so long without progress, the missing rank will not come."""
LIFE_S = 1.0
"""After so long without progress, a rank may have died."""
_PAUSE_S = 0.0005
_LEFT = 2
"""Mark of a rank that takes nothing more."""


class CooperativeRead:
    """One rank's end.  `chunks`: how many there are in all, numbered alike by all members."""

    def __init__(
        self,
        arena: Arena,
        members: Sequence[int],
        rank: int,
        *,
        chunks: int,
        chunk_bytes: int,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Raises StorageError when the memory is too small for so many or such large chunks."""
        assert arena.fd is not None
        self._fd = arena.fd
        self._arena, self._members = arena, list(members)
        self._me = self._members.index(rank)
        count = len(self._members)
        size = page_align(chunk_bytes)
        buffers = min((arena.nbytes - READING_TABLE_BYTES) // size, 2**16 - 1)
        self._per_member = buffers // count
        if PAGE_BYTES + chunks * (2 * count + 2) > READING_TABLE_BYTES or self._per_member < 1:
            raise StorageError(f"{chunks} chunks of {chunk_bytes} bytes are too many to share")
        table = np.frombuffer(arena.view, dtype=np.uint8, count=READING_TABLE_BYTES)
        self._direct = bool(table[READING_HUGE_MARK])
        """A chunk is read into its buffer; else it is copied there."""
        self._marks = table[:count]
        """By member: 0 not here yet, 1 its needs are known, 2 takes nothing more."""
        start = PAGE_BYTES
        self._needs = table[start : start + count * chunks].reshape(count, chunks)
        start += count * chunks
        self._taken = table[start : start + count * chunks].reshape(count, chunks)
        start += count * chunks
        self._places = table[start : start + 2 * chunks].view(np.uint16)
        """By chunk: 0 not read, else 1 + its buffer."""
        self._size = size
        self._begun = np.zeros(chunks, dtype=bool)
        """Chunks that a thread of ours reads or takes, or has."""
        self._mine: dict[int, int] = {}
        """Chunks in buffers of ours, or on their way into one."""
        self._lock = threading.Lock()
        self._failed = False
        self._patience_s = patience_s
        self._alone = False
        """The others were given up."""
        self._moved = time.monotonic()

    # ------------------------------------------------------------------ coming and going

    def read_ahead(self, chunk: int, read: Callable[[int, memoryview | None], memoryview]) -> None:
        """Before `join`: a chunk that will most likely be needed, if a buffer is free for it.

        `read` is as in `run`; its exceptions pass through.  From one thread, which `join` comes
        after.
        """
        with self._lock:
            buffer = self._me * self._per_member + len(self._mine)
            if len(self._mine) == self._per_member or not self._claim(chunk):
                return
            self._mine[chunk] = buffer
        try:
            self._fetch(chunk, read)
        finally:
            self._unlock(chunk)

    def join(self, needed: Sequence[int]) -> None:
        """Says what this rank needs, and waits until all have said so or will not come."""
        self._needs[self._me, list(needed)] = 1
        self._lock_byte(len(self._begun) + self._me)
        self._marks[self._me] = 1
        deadline = time.monotonic() + self._patience_s
        while not all(self._marks) and not self._alone:
            self._alone = time.monotonic() > deadline
            time.sleep(_PAUSE_S)
        self._moved = time.monotonic()

    def leave(self) -> None:
        """Tell the other ranks not to wait for this one."""
        self._marks[self._me] = _LEFT

    # ------------------------------------------------------------------ the work

    def threads(self, readers: int) -> int:
        """Return this rank's number of threads.

        `readers` of all ranks together keep the storage busy.  More run only on processors of their
        own.  One more thread copies, while the others go on reading.
        """
        members = len(self._members)
        return 1 + max(-(-readers // members), min(readers, usable_cores() // members))

    def deliver(
        self,
        needed: Sequence[int],
        read: Callable[[int, memoryview | None], memoryview],
        put: Callable[[int, memoryview], None],
        *,
        readers: int,
    ) -> None:
        """Gives `put` every chunk that this rank needs, read once by one of the members.

        `readers`: threads that keep the storage busy; `read` and `put`: see `run`.
        """
        self.join(needed)
        threads = self.threads(readers)
        run_parallel(
            range(threads),
            lambda thread: self.run(read, put, takes=thread == 0),
            workers=threads,
        )

    def run(
        self,
        read: Callable[[int, memoryview | None], memoryview],
        put: Callable[[int, memoryview], None],
        *,
        takes: bool = False,
    ) -> None:
        """One thread of this rank: reads and takes until nothing is left that it needs.

        It reads as long as it has where to, and then takes; one of several `takes` first, and reads
        what no other rank needs.  `read(chunk, place)` gives its verified bytes, valid until the
        next call of this thread, in `place` if it likes; `put` may be given more than those.  An
        exception of either ends all threads of this rank.
        """
        try:
            self._run(read, put, takes=takes)
        except BaseException:
            self._failed = True
            raise

    def _run(
        self,
        read: Callable[[int, memoryview | None], memoryview],
        put: Callable[[int, memoryview], None],
        *,
        takes: bool,
    ) -> None:
        while not self._failed:
            chunk, ready = self._next(takes=takes)
            if chunk is None:
                if not self._has_untaken_chunks():
                    return
                self._look_around()
                time.sleep(_PAUSE_S)
            elif ready:
                put(chunk, self._buffer(int(self._places[chunk]) - 1))
                self._took(chunk)
            else:
                self._read(chunk, read, put)

    def _read(
        self,
        chunk: int,
        read: Callable[[int, memoryview | None], memoryview],
        put: Callable[[int, memoryview], None],
    ) -> None:
        try:
            data = self._fetch(chunk, read)
            if chunk in self._mine:
                self._begun[chunk] = False  # it is there to be taken, by us too
            else:
                put(chunk, data)
                self._took(chunk)
        finally:
            self._unlock(chunk)

    def _fetch(
        self, chunk: int, read: Callable[[int, memoryview | None], memoryview]
    ) -> memoryview:
        """A chunk, verified; the others find it in the buffer that was set aside for it."""
        number = self._mine.get(chunk)
        if number is None:
            return read(chunk, None)
        buffer = self._buffer(number)
        data = read(chunk, buffer if self._direct else None)
        _fill(buffer, data)
        self._places[chunk] = number + 1
        return data

    def _next(self, *, takes: bool) -> tuple[int | None, bool]:
        """(chunk to take or to read, it is there already); None: nothing to do now."""
        with self._lock:
            open_ = (self._needs[self._me] == 1) & ~self._begun
            there = self._places != 0
            ready = np.flatnonzero(open_ & there)
            if ready.size and takes:
                self._begun[ready[0]] = True
                return int(ready[0]), True
            shared = self._shared()
            buffer = None if takes else self._free_buffer(shared)
            waiting = np.flatnonzero(open_ & ~there & ((buffer is not None) | ~shared))
            # Each begins elsewhere, so that they meet seldom.
            turn = len(self._begun) * self._me // len(self._members)
            start = int(np.searchsorted(waiting, turn))
            for chunk in (int(c) for c in np.concatenate((waiting[start:], waiting[:start]))):
                if self._claim(chunk):
                    self._begun[chunk] = True
                    if shared[chunk] and buffer is not None:
                        self._mine[chunk] = buffer
                    return chunk, False
            if ready.size:
                self._begun[ready[0]] = True
                return int(ready[0]), True
            return None, False

    def _shared(self) -> NDArray[np.bool_]:
        """By chunk: another live rank needs it and has not taken it; once False, it stays False."""
        if self._alone:
            return np.zeros(len(self._begun), dtype=bool)
        there = self._marks == 1
        there[self._me] = False
        found: NDArray[np.bool_] = (self._needs[there] == 1) & (self._taken[there] == 0)
        return np.asarray(found.any(axis=0))

    def _free_buffer(self, shared: NDArray[np.bool_]) -> int | None:
        """A buffer of ours whose chunk every rank that needs it has taken, this one included."""
        ours = (self._needs[self._me] == 1) & (self._taken[self._me] == 0)
        held = {c: b for c, b in self._mine.items() if shared[c] or ours[c]}
        self._mine = held
        used, first = set(held.values()), self._me * self._per_member
        return next((b for b in range(first, first + self._per_member) if b not in used), None)

    def _buffer(self, number: int) -> memoryview:
        start = READING_TABLE_BYTES + number * self._size
        return self._arena.view[start : start + self._size]

    def _took(self, chunk: int) -> None:
        self._taken[self._me, chunk] = 1
        self._moved = time.monotonic()

    def _has_untaken_chunks(self) -> bool:
        """Whether we need chunks that no thread of ours has taken."""
        return bool(((self._needs[self._me] == 1) & (self._taken[self._me] == 0)).any())

    # ------------------------------------------------------------------ claims

    def _claim(self, chunk: int) -> bool:
        """Claim a chunk that no other rank reads; it may have become ready meanwhile."""
        if self._alone:
            return True
        if not self._lock_byte(chunk):
            return False
        if self._places[chunk]:
            self._unlock(chunk)
            return False
        return True

    def _lock_byte(self, number: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError:
            return False
        return True

    def _unlock(self, number: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, number)

    def _look_around(self) -> None:
        """Counts the dead as gone; gives everybody up when nothing moves."""
        idle = time.monotonic() - self._moved
        if idle < LIFE_S:
            return
        for member, mark in enumerate(self._marks):
            byte = len(self._begun) + member
            if mark == 1 and member != self._me and self._lock_byte(byte):
                self._unlock(byte)
                self._marks[member] = _LEFT
        self._alone |= idle > self._patience_s


def _fill(buffer: memoryview, data: memoryview) -> None:
    """`data` stands at the start of a buffer, where it may stand already."""
    source = np.frombuffer(data, dtype=np.uint8)
    target = np.frombuffer(buffer, dtype=np.uint8, count=len(data))
    if source.ctypes.data != target.ctypes.data:
        np.copyto(target, source)  # without the interpreter's lock
