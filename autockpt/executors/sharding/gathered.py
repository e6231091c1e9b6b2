"""Units of FSDP2 that still hold their gathered parameters at a boundary.

After a forward without a backward (an evaluation) the root unit keeps its parameters whole: the
module then has plain tensors under their names, and not the DTensors that the optimizer steps.
"""

import sys

import torch


def shard_again(module: torch.nn.Module) -> None:
    """Makes every unit hold its DTensors again; nothing is computed or sent.

    Between forward and backward it costs a second gathering, so it belongs to boundaries.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for unit in module.modules():
            if isinstance(unit, fsdp.FSDPModule):
                unit.reshard()
