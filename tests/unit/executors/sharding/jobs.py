"""Ranks in one process that take batches step by step and save where they stand."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from autockpt.executors.restore.progress import merge_positions
from autockpt.executors.state import state_tree
from autockpt.executors.state.data.data_position import DataPosition

Make = Callable[[int, int], Any]
"""Rank and world size to a loader."""


def stored(value: Any) -> Any:
    """The value after its way through an image."""
    tensors: dict[str, torch.Tensor] = {}
    return state_tree.decode(state_tree.encode(value, "progress", tensors), tensors)


class Job:
    """Ranks that take a batch each, step by step, and note which samples they saw."""

    def __init__(self, make: Make, world: int, saved: Sequence[Any] | None = None) -> None:
        torch.manual_seed(1000 + world)  # as a script does before it attaches
        self.positions = [DataPosition(make(rank, world)) for rank in range(world)]
        for rank, position in enumerate(self.positions):
            state = None if saved is None else merge_positions(saved, rank, world)
            if state is not None:
                position.load(state)
                position.prepare()
        self._batches = [position.batches() for position in self.positions]
        self.seen: dict[int, Counter[int]] = {}

    def step(self) -> int:
        """One batch per rank; the epoch that all of them are in."""
        taken = []
        for position, batches in zip(self.positions, self._batches, strict=True):
            batch = next(batches)
            taken.append((position.epoch, len(batch)))
            self.seen.setdefault(position.epoch, Counter()).update(batch.tolist())
        assert len(set(taken)) == 1, "ranks must stay in step, batch by batch"
        return taken[0][0]

    def save(self) -> list[Any]:
        """What each rank's image holds."""
        return [stored(position.state()) for position in self.positions]


def shared(length: int, workers: int = 0, *, batch_size: int = 2, persistent: bool = False) -> Make:
    """Loaders with a DistributedSampler."""

    def make(rank: int, world: int) -> DataLoader[Any]:
        sampler = DistributedSampler(range(length), world, rank, seed=7)
        return DataLoader(
            range(length), batch_size, sampler=sampler, num_workers=workers,
            persistent_workers=persistent,
        )  # fmt: skip

    return make


def position_batches(batches: Iterator[Any], count: int) -> list[list[int]]:
    """Some batches."""
    return [next(batches).tolist() for _ in range(count)]
