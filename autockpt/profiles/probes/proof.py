"""Which tensors stay as they are from the boundary to the fence?  Proven by content, not by claim.

torch's version counters do not see fused optimizers, `.data` or numpy writes.  So every byte is
digested at the boundary and again right before the next optimizer step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

Digest = Callable[[memoryview], Any]


class ChangeProof:
    """Digests of all tensors at one boundary."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], digest: Digest) -> None:
        self._digest = digest
        self._before = {name: self._of(tensor) for name, tensor in tensors.items()}

    def changed(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Names of tensors that differ now, are new or are gone."""
        now = {name: self._of(tensor) for name, tensor in tensors.items()}
        return {
            name
            for name in self._before.keys() | now.keys()
            if self._before.get(name) != now.get(name)
        }

    def _of(self, tensor: torch.Tensor) -> Any:
        return (str(tensor.dtype), tuple(tensor.shape), self._digest(raw_bytes(tensor)))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor: in place for contiguous host tensors, a copy otherwise."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data
