"""Tear checks for a few changed elements: tensors that are compared byte for byte.

Canaries see every update of a whole tensor.  Writes of single rows past autograd (`.data`, numpy, a
memory bank in the forward) are found by two samples:

* a rotating one of 2 MiB is compared with the slot, where the copy thread has put it.  It sees what
  is written behind the copy.
* probes are kept as they are at the boundary and compared at the fence, whole.  The first ten
  snapshots probe a tenth of the bytes each, so that every tensor has had its turn then; later ones
  a hundredth.  A write in every iteration, even of one element, is found within ten snapshots with
  certainty (within a hundred if it begins later).

On the host a probe is copied into the slot at the boundary, where it has to come anyway.  It costs
that share of the copy as a stall, and a comparison beside the training.  On a device that has no
clone of the state a probe is cloned there.  Where there is no room for the clone of a tensor, rows
of it are drawn.  One of r changed rows is found with probability 1 - (1 - f)^r, f the share drawn.
"""

import bisect
import ctypes
import random
from collections.abc import Callable, Sequence

import torch

from autockpt.executors.image.layout.plan import Entry
from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot.copy_plan import CopyPlan, slot_tensor, stored_of

FIRST_SNAPSHOTS = 10
FIRST_SHARE, LATER_SHARE = 0.1, 0.01
"""The fraction of the bytes probed in each of the first snapshots, and in each later one on
average."""
LEAST_BYTES = 64 * 2**10
"""Probed in a snapshot of a small state."""
DRAWN_BYTES = 16 * 2**20
"""The most bytes of rows drawn from one tensor of a device."""
ROW_ELEMENTS = 256
"""A row that is drawn: neighbours, wherever the rows of the tensor begin."""
SAMPLE_BYTES = 2 * 2**20
"""Bytes compared in a snapshot (about 0.2 ms)."""


class Probe:
    """The pieces of a copy that are kept as of the boundary, and compared at the fence."""

    def __init__(self) -> None:
        self._turn = self._snapshots = self._known_bytes = 0
        self._credit = 0.0
        """Bytes that may be probed now; below 0 behind a large tensor, until that is paid off."""

    def next(self, sizes: Sequence[int]) -> list[int]:
        """Indices of the pieces whose turn it is, in order; `sizes` in bytes, by piece."""
        total = sum(sizes)
        if total > self._known_bytes:  # what is new has not had its turn
            self._snapshots, self._credit = 0, 0.0
        self._known_bytes = total
        share = FIRST_SHARE if self._snapshots < FIRST_SNAPSHOTS else LATER_SHARE
        self._snapshots += 1
        self._credit = min(self._credit, 0.0) + max(LEAST_BYTES, total * share)
        chosen: set[int] = set()
        for _ in sizes:
            if self._credit <= 0:
                break
            index = self._turn % len(sizes)
            self._turn += 1
            self._credit -= sizes[index]
            chosen.add(index)
        return sorted(chosen)


def entries_of(entries: Sequence[Entry], start: int, stop: int) -> Sequence[Entry]:
    """Return the entries whose ends are in the image behind `start` and up to `stop`."""
    first = bisect.bisect_right(entries, start, key=lambda entry: entry.end)
    last = bisect.bisect_right(entries, stop, key=lambda entry: entry.end)
    return entries[first:last]


def by_part(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The same by the part whose fence compares them."""
    parts: dict[str, list[Entry]] = {}
    for entry in entries:
        parts.setdefault(entry.spec.part, []).append(entry)
    return parts


class DeviceProbe:
    """Tensors of a device as they are at the boundary, whole or rows of them, kept there."""

    def __init__(
        self,
        sources: dict[str, torch.Tensor],
        *,
        has_room: Callable[[int], bool],
        draw: random.Random,
    ) -> None:
        """In the order of the training stream.  Raises torch.OutOfMemoryError."""
        self._sources = sources
        self._rows: dict[str, torch.Tensor | None] = {}
        self._kept: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, source in sources.items():
                rows = None if has_room(source.nbytes) else _drawn_rows(source, draw)
                self._rows[name] = rows
                self._kept[name] = _view(source, rows).clone()

    def differing(self, names: Sequence[str]) -> torch.Tensor:
        """One byte for each of `names`: 1 if it is not as it was; computed where it is."""
        with torch.no_grad():
            return torch.stack([self._differs(name) for name in names]).view(torch.uint8)

    def _differs(self, name: str) -> torch.Tensor:
        source, kept = self._sources[name], self._kept.pop(name)
        if not source.data_ptr():  # its memory was given back
            return torch.ones((), dtype=torch.bool, device=source.device)
        return (_view(source, self._rows[name]) != kept).any()


def _drawn_rows(source: torch.Tensor, draw: random.Random) -> torch.Tensor | None:
    """Draw rows of a tensor that is larger than `DRAWN_BYTES`; None: all."""
    rows = source.numel() // ROW_ELEMENTS
    count = DRAWN_BYTES // (ROW_ELEMENTS * source.element_size())
    if not source.is_contiguous() or rows <= count:
        return None
    drawn = torch.tensor(
        [draw.randrange(rows) for _ in range(count)], dtype=torch.int64, device="cpu"
    )
    return drawn.to(source.device, non_blocking=True)


def _view(source: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Bytes of a tensor, or of rows of it."""
    flat = source.detach().contiguous().view(-1)
    if rows is not None:
        whole = flat.numel() // ROW_ELEMENTS * ROW_ELEMENTS
        flat = flat[:whole].view(-1, ROW_ELEMENTS).index_select(0, rows).view(-1)
    return flat.view(torch.uint8)


class TearChecker:
    """Whose turn it is."""

    def __init__(self) -> None:
        self._turn = 0

    def next(self, entries: list[Entry]) -> dict[str, list[Entry]]:
        """By part the tensors to compare in the coming snapshot; at least one."""
        sample: dict[str, list[Entry]] = {}
        budget = SAMPLE_BYTES
        for _ in entries:
            entry = entries[self._turn % len(entries)]
            if sample and entry.spec.nbytes > budget:
                break
            self._turn += 1
            budget -= entry.spec.nbytes
            sample.setdefault(entry.spec.part, []).append(entry)
        return sample


def sample_differs(
    recipe: CopyPlan, arena: Arena, sample: Sequence[Entry], limit: int | None
) -> list[str]:
    """Names of tensors that are not what stands in the slot, in their first `limit` bytes."""
    return [
        entry.spec.name
        for entry in sample
        if not _same_bytes(arena, entry, recipe.sources[entry.spec.name], limit)
    ]


def part_differs(
    recipe: CopyPlan, arena: Arena, part: str, now: dict[str, torch.Tensor]
) -> list[str]:
    """All tensors of a part that are not what stands in the slot: only once a change was seen."""
    differing = []
    for entry in recipe.entries:
        name = entry.spec.name
        if entry.spec.part != part or name not in now:
            continue
        if now[name].shape != recipe.tensors[name].shape:
            continue  # replaced: known by then
        stored = stored_of(name, now[name], recipe.shares)
        if stored.nbytes == entry.spec.nbytes and not _same_bytes(arena, entry, stored, None):
            differing.append(name)
    return differing


_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _same_bytes(arena: Arena, entry: Entry, source: torch.Tensor, limit: int | None) -> bool:
    if not source.data_ptr():
        return False  # its memory was given back
    if source.device.type != "cpu" or not source.is_contiguous():
        return torch.equal(
            slot_tensor(arena, entry).contiguous().view(-1).view(torch.uint8),
            source.detach().cpu().contiguous().view(-1).view(torch.uint8),
        )
    count = entry.spec.nbytes if limit is None else min(limit, entry.spec.nbytes)
    return bool(_libc.memcmp(arena.address + entry.offset, source.data_ptr(), count) == 0)
