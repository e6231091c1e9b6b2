"""Where the elements of a holding stand: the live memory of this rank."""

from typing import Any

import torch

from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.values.errors import ConfigError


def own_elements(tensor: torch.Tensor, holding: LocalShard) -> torch.Tensor:
    """The elements of this rank in the order of the boxes, without copying.

    That is the local tensor of a DTensor, the partition of a ZeRO-3 parameter, or the tensor.
    Padding at the end is left out (the result is 1-D then): FSDP1's flat units, ZeRO-3 and padded
    vocabularies have it.  Of nothing but padding there is nothing.  Raises ConfigError when the
    memory does not fit the holding, as that of a tensor that a wrapper has gathered.
    """
    local: Any = tensor
    if hasattr(local, "to_local"):
        local = local.to_local()
    elif hasattr(local, "ds_tensor"):
        local = local.ds_tensor
    if local.numel() == holding.count:
        return local  # type: ignore[no-any-return]
    if not holding.count:
        return local.flatten()[:0]  # type: ignore[no-any-return]
    gathered = local is tensor and tuple(local.shape) == holding.global_shape
    if local.numel() < holding.count or gathered or not local.is_contiguous():
        raise ConfigError(
            f"a local tensor of shape {tuple(local.shape)} with strides {local.stride()} does not "
            f"hold {holding.count} elements of {holding.global_shape} and padding behind them"
        )
    return local.view(-1).narrow(0, 0, holding.count)  # type: ignore[no-any-return]
