"""DeepSpeed ZeRO 1, 2 and 3: flat fp32 partitions, seen as slices of the model's parameters.

Recognised by attributes, never imported.  ZeRO 1 and 2 keep the parameters whole on every rank, and
cut the flat fp32 copy and its optimizer state into ranges.  A parameter's `_hp_mapping` is its part
of this rank's range.  ZeRO 3 cuts every parameter by itself (`ds_tensor`) and lays the parts of a
group one after another.  Padding of a range belongs to no part.

The attributes were read in, and tried with, DeepSpeed 0.19.8 on CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autockpt.executors.image.layout.boxes import flat_range_boxes
from autockpt.executors.sharding.local_shard import LocalShard, whole_of
from autockpt.executors.sharding.process_groups import ranks_of
from autockpt.values.errors import ConfigError


def of_deepspeed(module: torch.nn.Module) -> Iterator[tuple[torch.Tensor, LocalShard]]:
    """Parameters of ZeRO 1 and 2 are copies, parameters of ZeRO 3 ranges; see `own_elements`."""
    for parameter in module.parameters():
        known: Any = parameter
        if hasattr(known, "ds_tensor"):
            yield parameter, _range(known)
        elif hasattr(known, "_hp_mapping") and hasattr(known, "_dp_group"):
            yield parameter, whole_of(parameter, ranks_of(known._dp_group))


def is_zero(optimizer: object) -> bool:
    """DeepSpeed's optimizer with flat partitions."""
    return hasattr(optimizer, "optimizer") and (
        hasattr(optimizer, "single_partition_of_fp32_groups")
        or hasattr(optimizer, "fp32_partitioned_groups_flat")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's part of one parameter in its flat partition."""

    flat: torch.Tensor
    """The fp32 partition; the inner optimizer has its state by it."""
    start: int
    """First element of the part in it."""
    first: int
    """First element of the part in this rank's memory of the parameter."""
    holding: LocalShard

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The part, live and 1-D, of a tensor in the form of the partition."""
        return flat.detach().narrow(0, self.start, self.holding.count)

    def trained(self, parameter: torch.Tensor) -> torch.Tensor:
        """The part of the parameter itself, 1-D, in the precision of the training."""
        memory: torch.Tensor = getattr(parameter, "ds_tensor", parameter)
        return memory.detach().reshape(-1).narrow(0, self.first, self.holding.count)


def part_of(optimizer: Any, parameter: Any) -> Part | None:
    """Where this rank has the fp32 copy of a parameter; None: nothing of it here.

    Raises ConfigError for a partition that is not in memory.
    """
    if hasattr(parameter, "ds_tensor"):
        place = optimizer.grad_position.get(optimizer.get_param_id(parameter))
        if place is None:  # frozen
            return None
        group, start, _ = place
        if optimizer._swappable_optimizer_subgroup(group):
            raise ConfigError(
                "DeepSpeed: the optimizer state is on NVMe (offload_optimizer), not in memory; "
                "set its device to cpu or none to have it in checkpoints"
            )
        flat = optimizer.fp32_partitioned_groups_flat[group]
        return Part(flat=flat, start=start, first=0, holding=_range(parameter))
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    first, shape = mapping.lp_fragment_address.start, tuple(parameter.shape)
    boxes = flat_range_boxes(first, first + mapping.lp_fragment_address.numel, shape)
    return Part(
        flat=optimizer.single_partition_of_fp32_groups[mapping.param_group_index],
        start=mapping.hp_fragment_address.start,
        first=first,
        holding=LocalShard(global_shape=shape, boxes=tuple(boxes)),
    )


def _range(parameter: Any) -> LocalShard:
    """This rank's range of a ZeRO-3 parameter: equal ones, the last of them padded."""
    size, total = parameter.ds_tensor.numel(), parameter.ds_numel
    start = min(parameter.ds_zero_partition_rank * size, total)
    shape = tuple(parameter.ds_shape)
    boxes = flat_range_boxes(start, min(start + size, total), shape)
    return LocalShard(global_shape=shape, boxes=tuple(boxes))
