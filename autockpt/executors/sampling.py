"""A rotating sample of the state, compared with the slot byte for byte.

Canaries see every update of a whole tensor.  What changes single elements is found here, in as many
snapshots as the sample needs to come round.
"""

import ctypes
from collections.abc import Sequence

import torch

from autockpt.executors.layout.plan import Entry
from autockpt.executors.memory import Arena
from autockpt.executors.recipe import Recipe, slot_tensor, stored_of

SAMPLE_BYTES = 2 * 2**20
"""Bytes compared in a snapshot (about 0.2 ms)."""


class Sampler:
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


def sample_differs(recipe: Recipe, arena: Arena, sample: Sequence[Entry]) -> list[str]:
    """Names of sampled tensors that are not what stands in the slot."""
    return [
        entry.spec.name
        for entry in sample
        if not _same_bytes(arena, entry, recipe.sources[entry.spec.name], SAMPLE_BYTES)
    ]


def part_differs(
    recipe: Recipe, arena: Arena, part: str, now: dict[str, torch.Tensor]
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
