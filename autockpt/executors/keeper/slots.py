"""The memory a keeper holds for its ranks: slots, boards, and sealed images."""

import os
from dataclasses import dataclass, field

from autockpt.executors.image.container import (
    ImageIndex,
    clear_trailer,
    read_trailer,
    trailer_capacity,
    write_trailer,
)
from autockpt.executors.image.layout.room import Room, find_room, smallest_window
from autockpt.executors.image.nan_check import floats_in, sampled_nan
from autockpt.executors.keeper.wire import SlotsWanted
from autockpt.executors.linux.memory import Arena, Headroom, gather_pages, headroom, page_align
from autockpt.executors.protocol.messages import HeldShard
from autockpt.values.errors import GuardError, NoRoomError
from autockpt.values.generation import Generation
from autockpt.values.units import format_bytes

BOARD_BYTES = 4096
CELL_STEP, CELL_STEP_NS, CELL_STARTED_NS, CELL_STARTED_STEP = 2, 3, 4, 5
"""Cells of the board, 64 bits each: step of the newest boundary, its CLOCK_MONOTONIC in ns, and
when and at which step this process began."""
CELL_SPREAD, CELL_MARKED = 6, 7
"""Iterations that copies to other nodes may take, 0 without marks; and the number of marks made."""
CELL_DRAINED = 8
"""Prefix of a streamed image whose memory was given back; written by the keeper."""
CELL_BEAT_NS, CELL_BEATS, CELL_DOING = 9, 10, 11
"""Newest sign of progress (CLOCK_MONOTONIC in ns), their number, and the rank's activity
(`hangs.pace.DOINGS`)."""
CELL_HELD = 12
"""Step of the boundary whose state the rank has, from its record on to the next change; else 0."""
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
    records: list[Arena] = field(default_factory=list)
    """Records of boundaries, as in `saving.boundary_record`; empty: the rank makes none."""
    chunk_bytes: int = 0
    trailer_bytes: int = 0
    room: Room | None = None
    """The memory it was given; a streamed image has one slot whose pages are given back behind
    it."""
    note: str = ""
    """Why it was given less than it asked for; empty: it was not."""

    @property
    def streams(self) -> bool:
        """No image is held whole."""
        return self.room is not None and self.room.slots == 0

    @property
    def total_bytes(self) -> int:
        """Host memory that it takes."""
        if self.room is not None and self.room.slots == 0:
            return self.room.window_bytes
        return sum(arena.nbytes for arena in self.slots)

    @property
    def image_capacity(self) -> int:
        """Bytes of image that fit a slot."""
        return self.slots[0].nbytes - self.trailer_bytes if self.slots else 0

    def take_board(self, board: Arena | None) -> None:
        """From now on progress is read there.  A reader of the former board may finish."""
        if self.board is not None:
            self.board.let_go()
        self.board = board
        self.take_records([])

    def take_records(self, records: list[Arena]) -> None:
        """From now on the rank records its boundaries there."""
        for record in self.records:
            record.close()
        self.records = records

    def cell(self, index: int) -> int:
        """A number on the board, 0 without a board."""
        board = self.board
        return 0 if board is None else int(board.view.cast("Q")[index])

    def copied(self, slot: int) -> int:
        """Copied prefix of the image in a slot."""
        return self.cell(CELL_COPIED + slot)

    def set_copied(self, slot: int, nbytes: int) -> None:
        """In place of a trainer that is dead."""
        if self.board is not None:
            self.board.view.cast("Q")[CELL_COPIED + slot] = nbytes

    def set_drained(self, board: Arena | None, nbytes: int) -> None:
        """Tells the trainer with `board` how far its streamed image is through."""
        if board is not None and board.fd is not None:
            board.view.cast("Q")[CELL_DRAINED] = nbytes

    def image(self, slot: int, image_bytes: int) -> memoryview:
        """The image in a slot."""
        return self.slots[slot].view[:image_bytes]

    def chunk_of(self, asked_bytes: int) -> int:
        """Chunks of an image that was asked for with this size of chunk, bytes.

        The slots have room for the digests of chunks of `chunk_bytes`, so for larger ones, too.
        """
        return self.chunk_bytes if self.streams else max(self.chunk_bytes, asked_bytes)

    def trailer(self, slot: int) -> memoryview:
        """The description behind the image."""
        return self.slots[slot].view[self.slots[slot].nbytes - self.trailer_bytes :]

    def seal(self, slot: int, index: ImageIndex) -> None:
        """Makes the slot self-describing."""
        write_trailer(self.trailer(slot), index)

    def clear(self, slot: int) -> None:
        """Makes the slot garbage; one that streams holds no memory then."""
        if self.streams:
            self.slots[slot].release_pages()
        else:
            clear_trailer(self.trailer(slot))

    def sealed(self) -> dict[int, ImageIndex]:
        """Index by slot of everything sealed."""
        found: dict[int, ImageIndex] = {}
        for slot in range(0 if self.streams else len(self.slots)):
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

    def adopted_shards(self, run_id: str) -> tuple[HeldShard, ...]:
        """Return the adopted memory for the protocol."""
        return tuple(
            HeldShard(
                rank=self.rank, slot=slot, generation=index.generation, step=index.step,
                root=index.root, layout_digest=index.layout_digest, bytes=index.image_bytes,
                world_size=index.world_size, chunk_bytes=index.chunk_bytes,
                across_nodes=index.across_nodes, proofs_known=False,
                health="suspect" if self._is_sick(slot, index) else "good",
            )
            for slot, index in self.sealed().items()
            if index.run_id == run_id
        )  # fmt: skip

    def _is_sick(self, slot: int, index: ImageIndex) -> bool:
        """The verdict of the keeper before died with it."""
        image = self.slots[slot].view[: index.image_bytes]
        floats = floats_in(image, beyond=index.head_bytes)
        return bool(sampled_nan(floats, image, index.generation.step))

    def give_up(self, slot: int) -> Arena:
        """The memory of a slot, to be kept apart; the rank's slots are about to be closed."""
        arena = self.slots[slot]
        assert arena.fd is not None
        return Arena.attach(os.dup(arena.fd), fault=False)

    def close_slots(self) -> None:
        """Gives the slots' memory back."""
        for arena in self.slots:
            arena.close()
        self.slots, self.room, self.note = [], None, ""


class MemoryTable:
    """RankMemory by rank, within one budget for the node."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankMemory] = {}

    def of(self, rank: int) -> RankMemory:
        """The memory of a rank, empty at first."""
        return self.ranks.setdefault(rank, RankMemory(rank=rank))

    def free(self, rank: int) -> None:
        """Gives all memory of a rank back."""
        memory = self.ranks.pop(rank, None)
        if memory is not None:
            memory.close_slots()
            memory.take_board(None)

    @property
    def total_bytes(self) -> int:
        """All slots and windows of this node."""
        return sum(memory.total_bytes for memory in self.ranks.values())

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

    def allocate(self, wanted: SlotsWanted, *, sharers: int = 1) -> RankMemory:
        """New slots for a rank, or a window where none fits; replaces what it had.

        `sharers`: ranks of this node that are still to be given theirs, this one included; they
        share the remaining room.  Raises GuardError where the policy does not allow even the least,
        NoRoomError where the host has no room for it.
        """
        memory = self.of(wanted.rank)
        memory.close_slots()
        if wanted.slots > MAX_SLOTS:
            raise GuardError(
                f"{wanted.slots} slots: at most {MAX_SLOTS} per rank; lower memory.slots"
            )
        size, left = _slot_bytes(wanted), headroom()
        room = self._find(wanted, left, sharers)
        if room is None:
            raise self._refusal(wanted, left, sharers)
        slots: list[Arena] = []
        try:
            for slot in range(room.slots):
                slots.append(Arena.create_shared(size, name=f"autockpt-r{wanted.rank}-s{slot}"))
            if not room.slots:
                slots.append(Arena.create_sparse(size, name=f"autockpt-window-r{wanted.rank}"))
        except BaseException:
            for arena in slots:
                arena.close()
            raise
        if room.slots:
            gather_pages(slots)
        memory.slots, memory.room = slots, room
        memory.note = _note(wanted, size, room, left)
        memory.chunk_bytes = room.chunk_bytes or wanted.chunk_bytes
        memory.trailer_bytes = size - page_align(wanted.image_bytes)
        return memory

    def add_slot(self, wanted: SlotsWanted, *, sharers: int = 1) -> bool:
        """Makes one more slot for a rank; False: it needs none, or the host has no room.

        One at a time, so that all ranks of a node get some.
        """
        memory = self.of(wanted.rank)
        if memory.streams or not 0 < len(memory.slots) < min(wanted.slots, MAX_SLOTS):
            return False
        size, left = memory.slots[0].nbytes, headroom()
        if size > min(self._available(wanted, left, sharers)):
            return False
        name = f"autockpt-r{wanted.rank}-s{len(memory.slots)}"
        try:
            arena = Arena.create_shared(size, name=name)
        except (GuardError, OSError):
            return False
        gather_pages([arena])
        memory.slots.append(arena)
        made = len(memory.slots)
        memory.room = Room(slots=made)
        what = f"slots of {format_bytes(size)} for rank {wanted.rank} fit so far"
        memory.note = f"{made} of {wanted.slots} {what}" if made < wanted.slots else ""
        return True

    def fits_whole(self, wanted: SlotsWanted, *, sharers: int = 1) -> bool:
        """Whether there is room for all that a rank wants, in place of its old slots."""
        self.of(wanted.rank).close_slots()
        room = self._find(wanted, headroom(), sharers)
        return room is not None and room.slots == wanted.slots

    def _find(self, wanted: SlotsWanted, left: Headroom, sharers: int) -> Room | None:
        available, allowed = self._available(wanted, left, sharers)
        return find_room(
            slot_bytes=_slot_bytes(wanted), slots=wanted.slots, chunk_bytes=wanted.chunk_bytes,
            available_bytes=min(available, allowed), may_stream=wanted.may_stream,
        )  # fmt: skip

    def _available(self, wanted: SlotsWanted, left: Headroom, sharers: int) -> tuple[int, int]:
        """(bytes that the host has for a rank, bytes that the policy allows it)."""
        available = left.beside_reserve(swing_bytes=wanted.swing_bytes) // max(1, sharers)
        limit = wanted.limit_bytes
        return available, available if limit is None else limit - self.total_bytes

    def _refusal(self, wanted: SlotsWanted, left: Headroom, sharers: int) -> GuardError:
        least = size = _slot_bytes(wanted)
        needs = f"1 slot for rank {wanted.rank}: needs {format_bytes(size)} of host memory"
        window = smallest_window(wanted.chunk_bytes)[0]
        if wanted.may_stream and window < size:
            least = window
            needs += f", or {format_bytes(least)} to stream through"
        available, allowed = self._available(wanted, left, sharers)
        if allowed < available:
            return GuardError(
                f"{needs}, the policy allows {format_bytes(max(0, allowed))}; raise "
                "limits.host_memory or lower memory.slots"
            )
        return NoRoomError(
            f"{needs}; {left.binding} has {format_bytes(left.available_bytes)} left, of which "
            f"{format_bytes(max(0, available))} may be taken: {format_bytes(least - available)} "
            "are missing; free them, or raise that limit"
        )


def _slot_bytes(wanted: SlotsWanted) -> int:
    trailer = trailer_capacity(wanted.image_bytes, wanted.chunk_bytes)
    return page_align(wanted.image_bytes) + trailer


def _note(wanted: SlotsWanted, size: int, room: Room, left: Headroom) -> str:
    """Why it is less than was asked for; empty: it is not."""
    if room.slots >= wanted.slots:
        return ""
    what = f"{left.binding} has {format_bytes(left.available_bytes)} left"
    if wanted.limit_bytes is not None:
        what += f", the policy allows {format_bytes(wanted.limit_bytes)} on the node"
    each = f"{wanted.slots} slots of {format_bytes(size)} for rank {wanted.rank} do not fit: {what}"
    if room.slots:
        return f"{each}; made were {room.slots}"
    how = "while the training waits" if room.blocking else "beside the training"
    return (
        f"{each}; checkpoints go to storage through {format_bytes(room.window_bytes)} of memory, "
        f"{how}, and none stays in memory"
    )
