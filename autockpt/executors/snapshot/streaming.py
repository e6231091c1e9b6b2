"""Where no image fits in memory: live state -> a window of it -> storage, in the image's order.

The slot is as large as the image and takes memory only where it is written.  The keeper gives each
chunk back when it is on storage.  The copy stays within the window of returned memory.  So a fence
waits for storage, and no longer than `PATIENCE_S` without progress: then the save is given up and
the training goes on.

Nothing is left in the slot to compare the state with at the fence.  So every piece gets a digest
when it is copied, and the state is digested once more before it may change.
"""

import ctypes
import time
from collections.abc import Callable, Iterator

import torch
import xxhash

from autockpt.executors.image.dtypes import true_dtype
from autockpt.executors.image.layout.plan import Entry
from autockpt.executors.keeper.slots import CELL_DRAINED
from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot.copy_engine import ProgressCounter, copy_tensors
from autockpt.executors.snapshot.copy_plan import CopyPlan, is_plain, slot_tensor
from autockpt.executors.state.tensor_index import local_part
from autockpt.values.errors import StorageError
from autockpt.values.units import format_bytes

PATIENCE_S = 30.0
"""A storage that takes nothing for so long is not waited for: the training stands still."""
POLL_S = 0.0005
LONGEST_POLL_S = 0.008


class Passage:
    """The way of one image through the window; one thread at a time copies."""

    def __init__(
        self,
        board: memoryview,
        *,
        window_bytes: int,
        gone: Callable[[], str],
        blocking: bool = False,
        patience_s: float | None = None,
    ) -> None:
        """Stream through `board`.

        `gone` says why memory is not given back any more, "" while it is.  `blocking`: the training
        waits at the boundary until all is through.  `patience_s`: None is `PATIENCE_S`.
        """
        self._cells = board[: len(board) // 8 * 8].cast("Q")
        self._window_bytes, self._piece_bytes = window_bytes, window_bytes // 4
        self._gone = gone
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self.blocking = blocking
        self._digests: dict[str, str] = {}
        """By tensor, digests of the copied bytes."""

    def begin(self) -> None:
        """Nothing of this image was given back."""
        self._cells[CELL_DRAINED] = 0

    def write_boundary(
        self,
        recipe: CopyPlan,
        boundary: dict[str, torch.Tensor],
        text: bytes,
        arena: Arena,
        publish: ProgressCounter,
    ) -> None:
        """Header, skeleton and boundary tensors.  Raises StorageError."""
        layout, extra = recipe.layout, recipe.extra
        entries = {entry.offset: entry for entry, _ in recipe.at_once}
        self._put(arena, 0, layout.header, publish)
        for offset in sorted([extra.offset, *entries]):
            if offset == extra.offset:
                self._put(arena, offset, text.ljust(layout.extra_bytes), publish)
            else:
                source = local_part(boundary[entries[offset].spec.name]).detach()
                for _ in self._copied(arena, entries[offset], source, publish):
                    pass
        publish.set(layout.boundary_end)

    def copy(
        self,
        recipe: CopyPlan,
        arena: Arena,
        publish: ProgressCounter,
        went: Callable[[int], None] = lambda end: None,
    ) -> None:
        """Every lazy tensor, in the order of the image.  Raises StorageError."""
        for entry in recipe.entries:
            name = entry.spec.name
            digest = xxhash.xxh3_128()
            for start, stop in self._copied(arena, entry, recipe.sources[name].data, publish):
                if not self.blocking:
                    digest.update(arena.view[start:stop])
                publish.set(stop)
            self._digests[name] = digest.hexdigest()
            went(entry.end)

    def differing(self, recipe: CopyPlan, part: str) -> list[str]:
        """Names of tensors of a part that are not what was copied of them."""
        return [
            entry.spec.name
            for entry in recipe.entries
            if entry.spec.part == part and not self._is_same(entry, recipe)
        ]

    def _is_same(self, entry: Entry, recipe: CopyPlan) -> bool:
        source = recipe.sources[entry.spec.name]
        if not source.data_ptr():
            return False  # its memory was given back
        digest, dtype = xxhash.xxh3_128(), true_dtype(entry.spec.true_dtype)
        for piece in _pieces(source.data, self._elements(dtype)):
            held = piece
            if piece.dtype != dtype or not is_plain(piece, piece.nbytes):
                held = torch.empty(piece.shape, dtype=dtype, device="cpu")
                copy_tensors([held], [piece])
            digest.update((ctypes.c_char * held.nbytes).from_address(held.data_ptr()))
        return digest.hexdigest() == self._digests.get(entry.spec.name)

    def _put(self, arena: Arena, offset: int, data: bytes, publish: ProgressCounter) -> None:
        for start in range(0, len(data), self._piece_bytes):
            stop = min(start + self._piece_bytes, len(data))
            self._wait(offset + stop)
            arena.view[offset + start : offset + stop] = data[start:stop]
            publish.set(offset + stop)

    def _copied(
        self, arena: Arena, entry: Entry, source: torch.Tensor, publish: ProgressCounter
    ) -> Iterator[tuple[int, int]]:
        """Copies a tensor; yields (start, stop) in the image of each piece before it counts."""
        target = slot_tensor(arena, entry)
        most = self._elements(target.dtype)
        for to, piece in zip(_pieces(target, most), _pieces(source, most), strict=True):
            start = to.data_ptr() - arena.address
            stop = start + to.nbytes
            self._wait(stop)
            if piece.dtype == to.dtype and is_plain(piece, to.nbytes):
                ctypes.memmove(to.data_ptr(), piece.data_ptr(), to.nbytes)
            else:
                copy_tensors([to], [piece])
            yield start, stop
            publish.set(stop)

    def _elements(self, dtype: torch.dtype) -> int:
        """Of a piece."""
        return max(1, self._piece_bytes // dtype.itemsize)

    def _wait(self, end: int) -> None:
        """Until the image may be in memory up to `end`.  Raises StorageError."""
        drained, pause_s = self._cells[CELL_DRAINED], POLL_S
        moved_s = time.monotonic()
        while end - self._cells[CELL_DRAINED] > self._window_bytes:
            if self._cells[CELL_DRAINED] != drained:
                drained, moved_s, pause_s = self._cells[CELL_DRAINED], time.monotonic(), POLL_S
            reason = self._gone()
            if not reason and time.monotonic() - moved_s > self._patience_s:
                reason = f"storage took nothing for {self._patience_s:.0f} s"
            if reason:
                raise StorageError(
                    f"the image streams through {format_bytes(self._window_bytes)} of memory, and "
                    f"{format_bytes(drained)} of it are through: {reason}"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)


def _pieces(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Parts of a tensor of at most `most` elements, in the order of its elements.

    Of the shape alone, so that a tensor and its place in the image have the same parts.
    """
    if tensor.numel() <= most:
        yield tensor
        return
    rows = most // (tensor.numel() // tensor.shape[0])
    if rows:
        yield from tensor.split(rows)
        return
    for row in tensor.unbind():
        yield from _pieces(row, most)
