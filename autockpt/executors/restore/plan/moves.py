"""Pieces -> live tensors: what goes where, each element exactly once.

The plan is complete before a byte is written.  For every wanted tensor, pieces give the boxes that
it still lacks, one piece after the other, until nothing is missing.  Its reads are then bound to
memory.  Chunks of images are put in any order, from any thread; at the end every element must have
been written.
"""

import bisect
import ctypes
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from autockpt.executors.image.container import ImageIndex
from autockpt.executors.image.layout.boxes import (
    Box,
    common_runs,
    flat_index,
    intersect,
    overlaps,
    without,
)
from autockpt.executors.restore.plan.stored import Piece
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.values.errors import ConfigError, CorruptCheckpointError

MOST_RUNS = 64
"""The most runs of bytes from one piece to one tensor; more finely cut pieces are copied box by
box."""


@dataclass(frozen=True, slots=True)
class Read:
    """The part of one piece that goes to one tensor, before there is memory for it."""

    piece: Piece
    regions: tuple[tuple[Box, Box], ...] | None
    """(box to copy, box of the part that it belongs to); None: all bytes as they are."""
    elements: int


@dataclass(slots=True, kw_only=True)
class Want:
    """One tensor to fill."""

    name: str
    holding: LocalShard
    memory: torch.Tensor
    """Contiguous host memory of this rank's part."""

    def views(self) -> list[tuple[Box, torch.Tensor]]:
        """Every box of the holding and the memory it stands in."""
        flat = self.memory.view(-1)
        found, start = [], 0
        for box in self.holding.boxes:
            found.append((box, flat.narrow(0, start, box.count).view(box.shape)))
            start += box.count
        return found


@dataclass(slots=True)
class Move:
    """The part of one piece that goes to one tensor."""

    want: Want
    piece: Piece
    regions: list[tuple[Box, Box, torch.Tensor]] | None
    """(box to copy, box of the memory it belongs to, that memory); None: all bytes as they are."""
    elements: int
    start: int = field(init=False)
    stop: int = field(init=False)
    runs: list[tuple[int, int, int]] | None = field(init=False)
    """Rows (first byte in the image, address it goes to, bytes); None: too many."""

    def __post_init__(self) -> None:
        nbytes = self.piece.nbytes
        self.start = self.piece.start
        self.stop = self.start + nbytes
        if self.regions is None:
            self.runs = [(self.start, self.want.memory.data_ptr(), nbytes)]
        else:
            self.runs = _runs_of(self.piece, self.regions)

    def put(self, low: int, high: int, address: int) -> int:
        """The bytes [low, high) of the image stand at `address`; elements written."""
        size = self.piece.dtype.itemsize
        if self.runs is not None:
            return _copy_runs(self.runs, low, high, address) // size
        raw = (ctypes.c_char * (high - low)).from_address(address)
        source = torch.frombuffer(raw, dtype=self.piece.dtype)
        first, count = (low - self.start) // size, 0
        for part in overlaps(self.piece.boxes, first, (high - self.start) // size):
            start = part.start - first
            held = source.narrow(0, start, part.box.count).view(part.box.shape)
            count += self._put_box(part.box, held)
        return count

    def _put_box(self, box: Box, held: torch.Tensor) -> int:
        count = 0
        for region, base, memory in self.regions or ():
            both = intersect(box, region)
            if both is not None:
                memory[both.slices_in(base)].copy_(held[both.slices_in(box)])
                count += both.count
        return count


def _copy_runs(runs: list[tuple[int, int, int]], low: int, high: int, address: int) -> int:
    """Copy the runs' bytes in [low, high) of the image at `address`; return their number."""
    copied = 0
    for start, target, nbytes in runs:
        first, last = max(low, start), min(high, start + nbytes)
        if last > first:
            ctypes.memmove(target + first - start, address + first - low, last - first)
            copied += last - first
    return copied


def _runs_of(
    piece: Piece, regions: Sequence[tuple[Box, Box, torch.Tensor]]
) -> list[tuple[int, int, int]] | None:
    size, base = piece.dtype.itemsize, piece.start
    found: list[tuple[int, int, int]] = []
    for box in piece.boxes:
        for region, outer, memory in regions:
            both = intersect(box, region)
            if both is None:
                continue
            runs = common_runs(both, box, outer, most=MOST_RUNS - len(found))
            if runs is None:
                return None
            target = memory.data_ptr()
            found += [(base + a * size, target + b * size, n * size) for a, b, n in runs]
        base += box.count * size
    return found


def lacking(holding: LocalShard, pieces: Iterable[Piece]) -> list[Box]:
    """Return the boxes of a part that no piece gives."""
    missing = [box for box in holding.boxes if box.count]
    for piece in pieces:
        if piece.global_shape == holding.global_shape and missing:
            if piece.boxes == holding.boxes:
                return []
            for box in piece.boxes:
                missing = without(missing, box)
    return missing


def reads_for(
    name: str, holding: LocalShard, dtype: torch.dtype, pieces: Sequence[Piece]
) -> tuple[Read, ...]:
    """From which pieces, the first ones first, a tensor is filled.

    Raises ConfigError when those are of another form, or leave something of it open.  The other
    pieces are not looked at: under a name of its own every rank may hold something else.
    """
    for piece in pieces[:1]:
        _require_same_form(name, holding, dtype, piece)
    same = next((piece for piece in pieces if piece.boxes == holding.boxes), None)
    if same is not None:
        _require_same_form(name, holding, dtype, same)
        return (Read(same, None, holding.count),)
    reads = []
    missing = list(holding.boxes)
    for piece in pieces:
        if not missing:
            break
        _require_same_form(name, holding, dtype, piece)
        regions, missing = _taken(piece, missing, holding.boxes)
        if regions:
            reads.append(Read(piece, tuple(regions), sum(region.count for region, _ in regions)))
    if missing:
        raise ConfigError(
            f"{name}: {sum(box.count for box in missing)} of {holding.count} elements "
            f"are in no shard of the checkpoint, first {missing[0]} of {holding.global_shape}"
        )
    return tuple(reads)


def bind(want: Want, reads: Sequence[Read]) -> list[Move]:
    """The reads of a tensor, with the memory that each fills."""
    views = {} if all(read.regions is None for read in reads) else dict(want.views())
    found = []
    for read in reads:
        regions = read.regions and [(box, base, views[base]) for box, base in read.regions]
        found.append(Move(want, read.piece, regions or None, read.elements))
    return found


def moves_for(want: Want, pieces: Sequence[Piece]) -> list[Move]:
    """`reads_for` of a tensor whose memory is there.  Raises ConfigError as that does."""
    return bind(want, reads_for(want.name, want.holding, want.memory.dtype, pieces))


def _taken(
    piece: Piece, missing: list[Box], outer: Sequence[Box]
) -> tuple[list[tuple[Box, Box]], list[Box]]:
    """Return (the missing boxes that a piece gives, the boxes still missing after it)."""
    regions = []
    for box in piece.boxes:
        for lacking in list(missing):
            both = intersect(box, lacking)
            if both is None:
                continue
            base = next(b for b in outer if intersect(b, both) == both)
            regions.append((both, base))
            missing = without(missing, both)
    return regions, missing


def _require_same_form(name: str, holding: LocalShard, dtype: torch.dtype, piece: Piece) -> None:
    shape = holding.global_shape
    if piece.global_shape != shape or piece.dtype != dtype:
        raise ConfigError(
            f"{name}: is {shape} {dtype} now, {piece.global_shape} {piece.dtype} in the "
            "checkpoint; the state changed shape since. Use --fresh to start over, or the code "
            "that wrote it"
        )


class Loading:
    """Moves by shard; `put` may be called from several threads."""

    def __init__(self, moves: Iterable[Move]) -> None:
        self._by_shard: dict[int, list[Move]] = {}
        self._left: dict[str, int] = {}
        """Elements still to come, by name."""
        for move in moves:
            self._left[move.want.name] = self._left.get(move.want.name, 0) + move.elements
            if move.elements:
                self._by_shard.setdefault(move.piece.shard, []).append(move)
        for moves_of in self._by_shard.values():
            moves_of.sort(key=lambda move: (move.start, move.stop))
        self._lock = threading.Lock()
        self._survey()

    def _survey(self) -> None:
        self._starts = {s: [m.start for m in moves] for s, moves in self._by_shard.items()}
        self._longest = {s: max(m.stop - m.start for m in ms) for s, ms in self._by_shard.items()}

    def put_head(self, shard: int, head: memoryview) -> None:
        """The first bytes of a shard, before any chunk: what stands in them whole is done."""
        moves = self._by_shard.pop(shard, [])
        address = address_of(head)
        for move in moves:
            if move.stop <= len(head):
                count = move.put(move.start, move.stop, address + move.start)
                self._left[move.want.name] -= count
        rest = [move for move in moves if move.stop > len(head)]
        if rest:
            self._by_shard[shard] = rest
        self._survey()

    def chunks(self, shard: int, index: ImageIndex) -> list[int]:
        """Chunks of a shard that hold something wanted."""
        found: set[int] = set()
        for move in self._by_shard.get(shard, ()):
            for low, high in _ranges(move):
                found.update(range(low // index.chunk_bytes, -(-high // index.chunk_bytes)))
        return sorted(found)

    @property
    def shards(self) -> list[int]:
        """Shards that hold something wanted."""
        return sorted(self._by_shard)

    def put(self, shard: int, start: int, data: memoryview) -> None:
        """`data` stands at `start` of a shard's image."""
        moves = self._by_shard.get(shard)
        if not moves:
            return
        stop, address = start + len(data), address_of(data)
        done: list[tuple[str, int]] = []
        # Second names and replicas may begin inside another move: none is longer than the longest.
        i = bisect.bisect_left(self._starts[shard], start - self._longest[shard])
        while i < len(moves) and moves[i].start < stop:
            move = moves[i]
            low, high = max(start, move.start), min(stop, move.stop)
            if high > low:
                done.append((move.want.name, move.put(low, high, address + low - start)))
            i += 1
        with self._lock:
            for name, count in done:
                self._left[name] -= count

    def finish(self) -> None:
        """Raises CorruptCheckpointError unless every element was written exactly once."""
        for name, left in self._left.items():
            if left:
                raise CorruptCheckpointError(
                    f"{name}: {abs(left)} elements were written "
                    f"{'never' if left > 0 else 'more than once'}; the checkpoint's index lies"
                )


def _ranges(move: Move) -> list[tuple[int, int]]:
    """Byte ranges of the image that hold what a move takes."""
    if move.runs is not None:
        return [(start, start + nbytes) for start, _, nbytes in move.runs]
    size, base, found = move.piece.dtype.itemsize, 0, []
    for box in move.piece.boxes:
        for region, _, _ in move.regions or ():
            both = intersect(box, region)
            if both is not None:
                last_of = [o + n - 1 for o, n in zip(both.offset, both.shape, strict=True)]
                first, last = base + flat_index(both.offset, box), base + flat_index(last_of, box)
                found.append((move.start + first * size, move.start + (last + 1) * size))
        base += box.count
    return found


def address_of(data: memoryview) -> int:
    """Where a buffer stands in memory."""
    if data.readonly:
        return ctypes.cast(ctypes.c_char_p(data.obj), ctypes.c_void_p).value or 0  # type: ignore[arg-type]
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
