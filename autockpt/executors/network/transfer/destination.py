"""The receiving end: memory that the owner hands in, one chunk at a time."""

import threading
from collections.abc import Callable
from typing import Protocol

from autockpt.executors.network.transfer.frames import Subject
from autockpt.values.errors import GuardError


class Destination(Protocol):
    """Where chunks go; called from several streams at once, until the fetch has ended, and never
    after `Transfer.abort` returned.

    `place` gives the memory of a chunk, at most once a chunk, and does not block.  After it comes
    `keep` when the chunk is there and its digest is right, or `drop` when it never will be.  An
    exception ends the transfer.
    """

    def place(self, number: int, nbytes: int) -> memoryview:
        """Writable memory of exactly `nbytes`."""

    def keep(self, number: int, chunk: memoryview) -> None:
        """`chunk`, the memory from `place`, holds chunk `number`."""

    def drop(self, number: int, chunk: memoryview) -> None:
        """`chunk` holds rubbish."""


class SlotDestination:
    """The image stands where a slot has it."""

    def __init__(self, image: memoryview, subject: Subject) -> None:
        """`image`: writable memory.  Raises GuardError when it is too small."""
        if len(image) < subject.image_bytes:
            raise GuardError(
                f"an image of {subject.image_bytes} bytes for a slot of {len(image)}; refuse it"
            )
        self._image, self._subject = image, subject

    def place(self, number: int, nbytes: int) -> memoryview:
        """The chunk's place in the slot."""
        start, stop = self._subject.chunk_range(number)
        return self._image[start:stop]

    def keep(self, number: int, chunk: memoryview) -> None:
        """It is in its place."""

    def drop(self, number: int, chunk: memoryview) -> None:
        """Do nothing: a slot is not read before it is sealed."""


class Staging:
    """Memory for chunks that only pass through, for any number of transfers at once."""

    def __init__(self, memory: memoryview, chunk_bytes: int) -> None:
        """`memory`: as many chunks as there may be streams, all transfers together."""
        starts = range(0, len(memory) - chunk_bytes + 1, chunk_bytes)
        self._free = [memory[start : start + chunk_bytes] for start in starts]
        self._lent: dict[int, memoryview] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        """Memory for a chunk.  Raises GuardError when all of it is in use."""
        with self._lock:
            if not self._free or nbytes > len(self._free[-1]):
                raise GuardError(
                    f"no memory for a passing chunk of {nbytes} bytes: {len(self._lent)} are "
                    "under way; fewer streams at a time, or more staging memory"
                )
            whole = self._free.pop()
            piece = whole[:nbytes]
            self._lent[id(piece)] = whole
            return piece

    def give_back(self, piece: memoryview) -> None:
        """Give back memory from `take`."""
        with self._lock:
            self._free.append(self._lent.pop(id(piece)))


class PassingDestination:
    """Chunks are handed on, verified, and their memory is used again: for parity and rebuilding."""

    def __init__(self, staging: Staging, *, kept: Callable[[int, memoryview], None]) -> None:
        """`kept(number, chunk)`: on the threads of the streams, valid until it returns."""
        self._staging, self._kept = staging, kept

    def place(self, number: int, nbytes: int) -> memoryview:
        """Staging memory."""
        return self._staging.take(nbytes)

    def keep(self, number: int, chunk: memoryview) -> None:
        """Hands it on."""
        try:
            self._kept(number, chunk)
        finally:
            self._staging.give_back(chunk)

    def drop(self, number: int, chunk: memoryview) -> None:
        """Its memory is free again."""
        self._staging.give_back(chunk)
