"""Sums of chunks: parity that is being made, and images that are being rebuilt.

A sum takes every announced term exactly once, in any order, from any number of threads.  It is
incomplete until the last one came.  The first term of a chunk is copied, so that nothing
needs to be cleared before.
"""

import hashlib
import threading
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from autockpt.executors.image.container import ImageIndex, chunk_digest
from autockpt.executors.keeper.replication.parity.field import BITS, bit_rows
from autockpt.executors.keeper.replication.parity.geometry import ParitySet, Term
from autockpt.executors.network.transfer.frames import Subject
from autockpt.values.errors import GuardError, ProtocolError
from autockpt.values.generation import Generation

Words = npt.NDArray[np.uint64]
Key = tuple[int, bool, int]
"""(member, whether of its parity, chunk)."""

_LOCKS = 64
"""Two streams add to one chunk at a time rarely; a lock for every chunk would be many."""


class ChunkSums:
    """Chunks of `view`, each the sum of its terms.  `view`: whole chunks, writable."""

    def __init__(self, view: memoryview, *, chunk_bytes: int, packet_bytes: int) -> None:
        if len(view) % chunk_bytes:
            raise GuardError(f"{len(view)} bytes of memory are not whole chunks of {chunk_bytes}")
        self._view, self._chunk_bytes = view, chunk_bytes
        self._packet_words = packet_bytes // 8
        self._begun = bytearray(len(view) // chunk_bytes)
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._scratch = threading.local()

    def add(self, number: int, data: memoryview, factor: int) -> None:
        """view[chunk number] += factor * data; `data` may be shorter than a chunk."""
        start = number * self._chunk_bytes
        with self._locks[number % _LOCKS]:
            target = self._view[start : start + self._chunk_bytes]
            if factor == 1 and not self._begun[number]:
                target[: len(data)] = data
                target[len(data) :] = bytes(len(target) - len(data))
            else:
                if not self._begun[number]:
                    target[:] = bytes(len(target))
                self._add(np.frombuffer(target, np.uint64), data, factor)
            self._begun[number] = 1

    def clear_rest(self, numbers: Iterable[int]) -> None:
        """Fill the chunks without a term with zeros."""
        for number in numbers:
            if not self._begun[number]:
                start = number * self._chunk_bytes
                self._view[start : start + self._chunk_bytes] = bytes(self._chunk_bytes)

    def _add(self, target: Words, data: memoryview, factor: int) -> None:
        unit = 8 if factor == 1 else 8 * BITS * self._packet_words
        whole = len(data) // unit * unit
        add_scaled(target, np.frombuffer(data[:whole], np.uint64), factor, self._packet_words)
        if whole < len(data):
            rest = np.zeros(unit // 8, np.uint64)
            rest.view(np.uint8)[: len(data) - whole] = np.frombuffer(data[whole:], np.uint8)
            add_scaled(target[whole // 8 :], rest, factor, self._packet_words)


def add_scaled(target: Words, source: Words, factor: int, packet_words: int) -> None:
    """target[: len(source)] += factor * source, by XORs of packets; without the GIL.

    `source` is whole blocks of BITS packets, or anything when the factor is 1.
    """
    if factor == 1:
        head = target[: len(source)]
        np.bitwise_xor(head, source, out=head)
        return
    rows = bit_rows(factor)
    block = BITS * packet_words
    for at in range(0, len(source), block):
        pieces = [source[at + i * packet_words : at + (i + 1) * packet_words] for i in range(BITS)]
        for row, bits in enumerate(rows):
            out = target[at + row * packet_words : at + (row + 1) * packet_words]
            for bit in bits:
                np.bitwise_xor(out, pieces[bit], out=out)


class _Ledger:
    """Terms that are still to come."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._open = set(keys)
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """How many."""
        return len(self._open)

    def strike(self, key: Key) -> None:
        """Raises ProtocolError for one that is not awaited: a term counted twice cancels itself."""
        with self._lock:
            if key not in self._open:
                member, of_parity, number = key
                what = "parity" if of_parity else "image"
                raise ProtocolError(f"chunk {number} of the {what} of member {member}: not awaited")
            self._open.remove(key)


class ParityMemory:
    """The parity that one member holds of the others, while it is made."""

    def __init__(self, parity: ParitySet, holder: int, view: memoryview) -> None:
        """`view`: `parity.parity_bytes` of writable memory."""
        if len(view) != parity.parity_bytes:
            raise GuardError(f"{len(view)} bytes for a parity of {parity.parity_bytes}")
        self.parity, self.holder = parity, holder
        self._view = view
        self._sums = ChunkSums(
            view, chunk_bytes=parity.chunk_bytes, packet_bytes=parity.packet_bytes
        )
        self._ledger = _Ledger(
            (member, False, number)
            for member in range(parity.members)
            for start, stop in parity.for_holder(member, holder)
            for number in range(start, stop)
        )

    @property
    def missing(self) -> int:
        """Chunks that have not come."""
        return self._ledger.left

    def add(self, member: int, number: int, data: memoryview) -> None:
        """Chunk `number` of a member's image, verified by its digest, counts from now on.

        Raises ProtocolError for one that does not belong here or came before.
        """
        self._ledger.strike((member, False, number))
        place = self.parity.place(member, number)
        factor = self.parity.factor(member, self.holder, place.stripe)
        self._sums.add(self.parity.parity_number(self.holder, place), data, factor)

    def subject(
        self, *, run_id: str, generation: Generation, step: int, rank: int, world_size: int
    ) -> Subject:
        """Its name in a transfer; `rank` stands for the holder."""
        words = f"parity-1 {self.parity.losses} {self.holder} {self.parity.image_bytes}"
        layout = hashlib.sha256(words.encode()).hexdigest()
        return Subject(
            what="parity", run_id=run_id, generation=generation, step=step, rank=rank,
            world_size=world_size, layout_digest=layout, image_bytes=len(self._view),
            chunk_bytes=self.parity.chunk_bytes,
        )  # fmt: skip

    def seal(self, subject: Subject) -> ImageIndex:
        """Its description, with the digests of its chunks.  Raises ProtocolError when not whole."""
        if self.missing:
            raise ProtocolError(f"{self.missing} chunks of the parity have not come")
        self._sums.clear_rest(range(self.parity.parity_chunks))
        ranges = [subject.chunk_range(number) for number in range(subject.chunks)]
        return ImageIndex(
            run_id=subject.run_id, generation=subject.generation, step=subject.step,
            rank=subject.rank, world_size=subject.world_size,
            layout_digest=subject.layout_digest, image_bytes=subject.image_bytes,
            chunk_bytes=subject.chunk_bytes,
            digests=tuple(chunk_digest(self._view[start:stop]) for start, stop in ranges),
        )  # fmt: skip


class Rebuild:
    """The image of a lost member, while it is summed up from the survivors' chunks."""

    def __init__(
        self,
        parity: ParitySet,
        member: int,
        lost: frozenset[int],
        image: memoryview,
        *,
        chunks: Iterable[int] | None = None,
    ) -> None:
        """`image`: `image_bytes[member]` of writable memory; `chunks`: only these (None: all).

        Survivors share the traffic if each rebuilds a part, the stripe whose parity it holds.
        Gathered in one place, N - 1 images would come in there.  Raises ConfigError beyond repair.
        """
        self._parity, self._image = parity, image
        self._chunks = sorted(range(parity.chunks(member)) if chunks is None else chunks)
        if len(image) != parity.image_bytes[member]:
            raise GuardError(f"{len(image)} bytes for an image of {parity.image_bytes[member]}")
        chunk, packet = parity.chunk_bytes, parity.packet_bytes
        self._whole = len(image) // chunk
        self._sums = ChunkSums(image[: self._whole * chunk], chunk_bytes=chunk, packet_bytes=packet)
        # The last chunk is summed apart: terms may be longer than what is left of the image.
        self._last = memoryview(bytearray(chunk))
        self._tail = ChunkSums(self._last, chunk_bytes=chunk, packet_bytes=packet)
        self._uses: dict[Key, tuple[int, int]] = {}
        for number in self._chunks:
            for term in parity.rebuild(member, number, lost):
                self._uses[_key(term)] = (number, term.factor)
        self._ledger = _Ledger(self._uses)

    @property
    def missing(self) -> int:
        """Chunks of survivors that have not come."""
        return self._ledger.left

    def needs(self, member: int, *, of_parity: bool) -> tuple[int, ...]:
        """Chunks of a survivor's image or parity that are needed, in order."""
        return tuple(
            sorted(n for who, parity, n in self._uses if (who, parity) == (member, of_parity))
        )

    def add(self, member: int, number: int, data: memoryview, *, of_parity: bool) -> None:
        """A chunk of a survivor, verified by its digest.  Raises ProtocolError if not awaited."""
        key = (member, of_parity, number)
        self._ledger.strike(key)
        target, factor = self._uses[key]
        if target < self._whole:
            self._sums.add(target, data, factor)
        else:
            self._tail.add(0, data, factor)

    def finish(self, index: ImageIndex) -> None:
        """Compares what was rebuilt with the lost member's own digests.

        Raises ProtocolError when terms are missing, CorruptCheckpointError for another image.
        """
        if self.missing:
            raise ProtocolError(f"{self.missing} chunks of survivors have not come")
        self._sums.clear_rest(number for number in self._chunks if number < self._whole)
        if self._chunks and self._chunks[-1] >= self._whole:
            self._tail.clear_rest((0,))
            start = self._whole * self._parity.chunk_bytes
            self._image[start:] = self._last[: len(self._image) - start]
        for number in self._chunks:
            start, stop = index.chunk_range(number)
            index.check(number, self._image[start:stop], source="rebuilt from parity")


def _key(term: Term) -> Key:
    return term.member, term.of_parity, term.number
