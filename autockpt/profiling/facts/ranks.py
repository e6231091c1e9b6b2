"""Ranks that take a profile together: who writes, and how they agree on one schedule.

They agree on the largest measurement of all ranks, on a gloo group of our own.  They exchange it
once after the warm-up and once after the blocking probes.  In between no rank waits for another.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autockpt.executors.snapshot.replica_shares import Place
from autockpt.launch.rank_env import place_of_rank

TIMEOUT_S = 180.0
"""Others wait this long for the rank that probes the storage."""


@dataclass(slots=True)
class Ranks:
    """This process and its place in the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    _group: Any = None

    @classmethod
    def find(cls) -> "Ranks":
        """From torch.distributed when it runs, else from the launcher's environment."""
        place = place_of_rank(os.environ)
        rank, world = place.rank, place.world_size
        local_rank, local_world = place.local_rank, place.local_size
        if dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        if world != place.world_size:  # the launcher does not know of this group
            local_rank, local_world = rank, world
        return cls(rank, world, local_rank, local_world)

    @property
    def nodes(self) -> int:
        """Nodes of the job, as far as the launcher tells."""
        return max(1, self.world_size // max(1, self.local_world_size))

    @property
    def node(self) -> int:
        """Node of this rank."""
        return self.rank // max(1, self.local_world_size)

    @property
    def place(self) -> Place | None:
        """This rank among those with whom it shares what all hold; None: alone."""
        if self.world_size == 1:
            return None
        local = max(1, self.local_world_size)
        return Place(rank=self.rank, nodes=tuple(r // local for r in range(self.world_size)))

    @property
    def writes(self) -> bool:
        """Whether this rank writes the profile."""
        return self.rank == 0

    @property
    def probes_node(self) -> bool:
        """Whether this rank measures links and storage of its node, while the others wait."""
        return self.local_rank == 0

    @property
    def together(self) -> bool:
        """Whether the ranks can talk."""
        return self.world_size > 1 and dist.is_available() and dist.is_initialized()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks; every rank must call it, it is a barrier too."""
        if not self.together:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._own_group())
        return [float(value) for value in tensor]

    def everyone(self, said: Any) -> list[Any]:
        """Return the values of all ranks, by rank; every rank must call it."""
        if not self.together:
            return [said]
        heard: list[Any] = [None] * self.world_size
        dist.all_gather_object(heard, said, group=self._own_group())
        return heard

    def _own_group(self) -> Any:
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
        return self._group

    def gathered(self, text: str) -> list[str]:
        """One text of every rank, by rank; every rank must call it."""
        if not self.together:
            return [text]
        data = text.encode()
        longest = int(self.largest([len(data)])[0])
        own = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        all_ranks = [torch.zeros_like(own) for _ in range(self.world_size)]
        dist.all_gather(all_ranks, own, group=self._group)
        return [bytes(each.tolist()).rstrip(b"\0").decode() for each in all_ranks]
