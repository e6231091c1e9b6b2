"""The memory a keeper holds for its ranks: slots, boards, and what is sealed in them."""

import os
from dataclasses import dataclass, field

from autockpt.executors.health import floats_in, sampled_nan
from autockpt.executors.image import (
    ImageIndex,
    clear_trailer,
    read_trailer,
    trailer_capacity,
    write_trailer,
)
from autockpt.executors.memory import Arena, gather_pages, page_align, require_headroom
from autockpt.executors.protocol.messages import HeldShard
from autockpt.executors.wire import SlotsWanted
from autockpt.values.errors import GuardError
from autockpt.values.generation import Generation
from autockpt.values.units import format_bytes

BOARD_BYTES = 4096
CELL_STEP, CELL_STEP_NS, CELL_STARTED_NS, CELL_STARTED_STEP = 2, 3, 4, 5
"""Cells of the board, 64 bits each: step of the newest boundary, its CLOCK_MONOTONIC in ns, and
when and at which step this process began."""
CELL_SPREAD, CELL_MARKED = 6, 7
"""Iterations that copies to other nodes may take, 0 where nobody marks; and how many marks were
made."""
CELL_COPIED = 64
"""From here on one cell a slot: the copied prefix of its image."""
MAX_SLOTS = 64
CELL_MARK = CELL_COPIED + MAX_SLOTS
"""From here on the newest marks of the rank's traffic, in turn."""
MARKS = BOARD_BYTES // 8 - CELL_MARK


@dataclass(slots=True)
class RankMemory:
    """Slots and board of one rank."""

    rank: int
    board: Arena | None = None
    slots: list[Arena] = field(default_factory=list)
    chunk_bytes: int = 0
    trailer_bytes: int = 0

    @property
    def image_capacity(self) -> int:
        """Bytes of image that fit a slot."""
        return self.slots[0].nbytes - self.trailer_bytes if self.slots else 0

    def take_board(self, board: Arena | None) -> None:
        """From now on progress is read there.  Whoever reads the one before may finish."""
        if self.board is not None:
            self.board.let_go()
        self.board = board

    def cell(self, index: int) -> int:
        """A number on the board, 0 without a board."""
        board = self.board
        return 0 if board is None else int(board.view.cast("Q")[index])

    def copied(self, slot: int) -> int:
        """Copied prefix of the image in a slot."""
        return self.cell(CELL_COPIED + slot)

    def image(self, slot: int, image_bytes: int) -> memoryview:
        """The image in a slot."""
        return self.slots[slot].view[:image_bytes]

    def trailer(self, slot: int) -> memoryview:
        """The description behind the image."""
        return self.slots[slot].view[self.slots[slot].nbytes - self.trailer_bytes :]

    def seal(self, slot: int, index: ImageIndex) -> None:
        """Makes the slot self-describing."""
        write_trailer(self.trailer(slot), index)

    def clear(self, slot: int) -> None:
        """Makes the slot garbage."""
        clear_trailer(self.trailer(slot))

    def sealed(self) -> dict[int, ImageIndex]:
        """Index by slot of everything sealed."""
        found = {}
        for slot in range(len(self.slots)):
            index = read_trailer(self.trailer(slot))
            if index is not None and index.rank == self.rank:
                found[slot] = index
        return found

    def holding(self, generation: Generation, run_id: str) -> Arena | None:
        """The slot that holds a generation, sealed."""
        for slot, index in self.sealed().items():
            if index.generation == generation and index.run_id == run_id:
                return self.slots[slot]
        return None

    def held(self, run_id: str) -> tuple[HeldShard, ...]:
        """What the protocol is told about adopted memory."""
        return tuple(
            HeldShard(
                rank=self.rank, slot=slot, generation=index.generation, step=index.step,
                root=index.root, layout_digest=index.layout_digest, bytes=index.image_bytes,
                world_size=index.world_size, chunk_bytes=index.chunk_bytes,
                health="suspect" if self._is_sick(slot, index) else "good",
            )
            for slot, index in self.sealed().items()
            if index.run_id == run_id
        )  # fmt: skip

    def _is_sick(self, slot: int, index: ImageIndex) -> bool:
        """The verdict of the keeper before died with it."""
        image = self.slots[slot].view[: index.image_bytes]
        floats = floats_in(image, beyond=index.head_bytes)
        return bool(sampled_nan(floats, image, index.generation.seq))

    def give_up(self, slot: int) -> Arena:
        """The memory of a slot, to be kept apart; the rank's slots are about to be closed."""
        arena = self.slots[slot]
        assert arena.fd is not None
        return Arena.attach(os.dup(arena.fd), fault=False)

    def close_slots(self) -> None:
        """Gives the slots' memory back."""
        for arena in self.slots:
            arena.close()
        self.slots = []


class MemoryTable:
    """RankMemory by rank, within one budget for the node."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankMemory] = {}

    def of(self, rank: int) -> RankMemory:
        """The memory of a rank, empty at first."""
        return self.ranks.setdefault(rank, RankMemory(rank=rank))

    def allocate_for(self, wanted: SlotsWanted) -> RankMemory:
        """What a trainer asks for.  Raises GuardError without headroom."""
        return self.allocate(
            wanted.rank, image_bytes=wanted.image_bytes, chunk_bytes=wanted.chunk_bytes,
            slots=wanted.slots, limit_bytes=wanted.limit_bytes,
        )  # fmt: skip

    def free(self, rank: int) -> None:
        """Gives all memory of a rank back."""
        memory = self.ranks.pop(rank, None)
        if memory is not None:
            memory.close_slots()
            memory.take_board(None)

    @property
    def total_bytes(self) -> int:
        """All slots of this node."""
        return sum(arena.nbytes for memory in self.ranks.values() for arena in memory.slots)

    def adopt(
        self, rank: int, descriptors: list[int], *, chunk_bytes: int, image_bytes: int
    ) -> RankMemory:
        """Takes over slots that a trainer kept alive while there was no keeper."""
        memory = self.of(rank)
        if memory.slots or not descriptors:
            for fd in descriptors:
                os.close(fd)
            return memory
        memory.slots = [Arena.attach(fd) for fd in descriptors]
        memory.chunk_bytes = chunk_bytes
        memory.trailer_bytes = memory.slots[0].nbytes - image_bytes
        return memory

    def allocate(
        self, rank: int, *, image_bytes: int, chunk_bytes: int, slots: int, limit_bytes: int | None
    ) -> RankMemory:
        """New slots for a rank; replaces smaller ones.  Raises GuardError without headroom."""
        memory = self.of(rank)
        memory.close_slots()
        trailer = trailer_capacity(image_bytes, chunk_bytes)
        size = page_align(image_bytes) + trailer
        others = self.total_bytes
        if slots > MAX_SLOTS:
            raise GuardError(f"{slots} slots: at most {MAX_SLOTS} per rank; lower memory.slots")
        require_headroom(
            slots * size,
            what=f"{slots} slot{'s' * (slots > 1)} of {format_bytes(size)} for rank {rank}",
            limit_bytes=None if limit_bytes is None else limit_bytes - others,
        )
        made: list[Arena] = []
        try:
            for slot in range(slots):
                made.append(Arena.create_shared(size, name=f"autockpt-r{rank}-s{slot}"))
        except BaseException:
            for arena in made:
                arena.close()
            raise
        gather_pages(made)
        memory.slots = made
        memory.chunk_bytes = chunk_bytes
        memory.trailer_bytes = size - page_align(image_bytes)
        return memory
