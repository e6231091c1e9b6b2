"""Units of FSDP2 that still hold their gathered parameters at a boundary.

After a forward without a backward (an evaluation) the root unit keeps its parameters whole.  The
module then has plain tensors under their names instead of the DTensors that the optimizer steps.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch


def gathering_units(module: torch.nn.Module) -> list[Any]:
    """The units of a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [unit for unit in module.modules() if isinstance(unit, fsdp.FSDPModule)]


def shard_again(units: Iterable[Any]) -> None:
    """Makes every unit hold its DTensors again; nothing is computed or sent.

    Between forward and backward it costs a second gathering, so it belongs to boundaries.
    """
    for unit in units:
        unit.reshard()
