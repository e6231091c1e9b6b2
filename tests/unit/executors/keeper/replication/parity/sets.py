"""A parity set in one process: images, parities, and the way back."""

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

from autockpt.executors.image.container import ImageIndex, chunk_digest
from autockpt.executors.keeper.replication.parity.geometry import ParitySet
from autockpt.executors.keeper.replication.parity.sums import ParityMemory, Rebuild
from autockpt.values.generation import Generation

GENERATION = Generation(term=1, step=7)


def index_of(image: memoryview, chunk_bytes: int, *, rank: int = 0) -> ImageIndex:
    """The description of an image."""
    starts = [*range(0, len(image), chunk_bytes), len(image)]
    return ImageIndex(
        run_id="run", generation=GENERATION, step=7, rank=rank, world_size=8,
        layout_digest="layout", image_bytes=len(image), chunk_bytes=chunk_bytes,
        digests=tuple(chunk_digest(image[a:b]) for a, b in pairwise(starts)),
    )  # fmt: skip


class Protected:
    """Random images and the parities of all members."""

    def __init__(
        self, sizes: Sequence[int], *, chunk_bytes: int = 128, losses: int = 1, seed: int = 0
    ) -> None:
        draw = random.Random(seed)
        self.parity = ParitySet(image_bytes=tuple(sizes), chunk_bytes=chunk_bytes, losses=losses)
        self.images = [memoryview(draw.randbytes(size)) for size in sizes]
        self.indexes = [index_of(image, chunk_bytes) for image in self.images]
        self.parities = [self._encode(holder, draw) for holder in range(len(sizes))]

    def chunk(self, member: int, number: int) -> memoryview:
        """A chunk of an image."""
        start = number * self.parity.chunk_bytes
        return self.images[member][start : start + self.parity.chunk_bytes]

    def _encode(self, holder: int, draw: random.Random) -> memoryview:
        view = memoryview(bytearray(draw.randbytes(self.parity.parity_bytes)))
        memory = ParityMemory(self.parity, holder, view)
        arrivals = [
            (member, number)
            for member in range(self.parity.members)
            for start, stop in self.parity.for_holder(member, holder)
            for number in range(start, stop)
        ]
        draw.shuffle(arrivals)
        for member, number in arrivals:
            memory.add(member, number, self.chunk(member, number))
        memory.seal(
            memory.subject(run_id="run", generation=GENERATION, step=7, rank=holder, world_size=8)
        )
        return view

    def rebuild(self, member: int, lost: frozenset[int]) -> bytes:
        """The image of a lost member, from the others only."""
        image = bytearray(random.Random(1).randbytes(len(self.images[member])))
        self.rebuild_chunks(member, lost, image, None)
        return bytes(image)

    def rebuild_chunks(
        self, member: int, lost: frozenset[int], image: bytearray, chunks: Iterable[int] | None
    ) -> int:
        """Rebuilds chunks of a lost member in `image`; how many chunks of others that took."""
        chunk_bytes, used = self.parity.chunk_bytes, 0
        rebuild = Rebuild(self.parity, member, lost, memoryview(image), chunks=chunks)
        for survivor in set(range(self.parity.members)) - lost:
            for number in rebuild.needs(survivor, of_parity=False):
                rebuild.add(survivor, number, self.chunk(survivor, number), of_parity=False)
                used += 1
            for number in rebuild.needs(survivor, of_parity=True):
                data = self.parities[survivor][number * chunk_bytes : (number + 1) * chunk_bytes]
                rebuild.add(survivor, number, data, of_parity=True)
                used += 1
        assert not any(
            rebuild.needs(gone, of_parity=which) for gone in lost for which in (False, True)
        )
        rebuild.finish(self.indexes[member])
        return used
