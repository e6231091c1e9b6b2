"""Copies of a parameter that drift apart: every rank its own, another number of ranks their mean.

Local SGD, routers that are averaged now and then: `averaged` in a rule.  The optimizer's state of
such a parameter is averaged as the parameter is.
"""

from collections.abc import Mapping, Sequence

import torch

from autockpt.executors.restore.plan.stored import Stored
from autockpt.executors.sharding.rules.rules import drifted_copies, unnumbered


class ReplicaAverage:
    """The stored copies that make the parameters of this rank."""

    def __init__(self, drifting: Mapping[str, int], stored: Stored, *, same_mesh: bool) -> None:
        """`drifting`: by name of a live parameter how many copies of it there are now."""
        self._counts = {} if same_mesh else drifting
        self._stored = stored
        self._live = {unnumbered(name): name for name in drifting}

    def __bool__(self) -> bool:
        """Some parameter may be a mean."""
        return bool(self._counts)

    def called(self, stored: str) -> str:
        """Return the live name of a stored parameter; another rank's copy gets this rank's name."""
        return self._live.get(unnumbered(stored), stored) if self._live else stored

    def copies(self, name: str) -> list[str]:
        """Stored names whose mean a parameter is; []: it is stored as itself."""
        if name not in self._counts:
            return []
        found = drifted_copies(name, self._stored.names())
        return [] if name in found and len(found) == self._counts[name] else found

    def copies_of_state(self, prefix: str, name: str, tensor: str) -> list[str]:
        """The same for a tensor of the optimizer state of a parameter."""
        copies = self.copies(name)
        for stored in (name, *copies):
            start = f"{prefix}.{stored}."
            if tensor.startswith(start):
                return [f"{prefix}.{copy}.{tensor.removeprefix(start)}" for copy in copies]
        return copies


def mean_of(copies: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float64, so that the mean of equal numbers is that number; the first of what counts."""
    first = copies[0]
    if len(copies) == 1 or not first.is_floating_point():
        return first
    total = first.double()
    for copy in copies[1:]:
        total += copy
    return (total / len(copies)).to(first.dtype)
