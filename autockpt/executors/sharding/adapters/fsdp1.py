"""FullyShardedDataParallel (FSDP1): every unit is one flat tensor, cut into equal ranges of ranks.

With `use_orig_params=True` a parameter is the 1-D slice of the range that is its own, possibly
empty: boxes of the original tensor.  With False the unit's `_flat_param` is one 1-D tensor, which
fits every number of ranks but no other kind of wrapper.  Padding to the length of the other ranges
stands at a range's end and is no part of any tensor.

torch offers no public access to these ranges; the names with underscores were read in 2.13.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch

from autockpt.executors.image.layout.boxes import Box, flat_range_boxes
from autockpt.executors.sharding.local_shard import LocalShard, whole_of
from autockpt.executors.sharding.process_groups import ranks_of
from autockpt.values.errors import ConfigError


def of_fsdp1(module: torch.nn.Module) -> Iterator[tuple[torch.Tensor, LocalShard]]:
    """The parameters of all units below a module.

    Raises ConfigError for a unit whose slices are no slices of the original tensors.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nobody can have wrapped anything, and importing it takes half a second
        return
    for unit in module.modules():
        if isinstance(unit, fsdp.FullyShardedDataParallel) and unit._handle is not None:
            yield from _unit(unit)


def _unit(unit: Any) -> Iterator[tuple[torch.Tensor, LocalShard]]:
    handle, flat = unit._handle, unit._handle.flat_param
    if not handle.uses_sharded_strategy:
        holders = ranks_of(unit.process_group)
        for parameter in flat._params if flat._params is not None else [flat]:
            yield parameter, whole_of(parameter, holders)
        return
    if not handle.is_sharded(flat):
        raise ConfigError(
            f"{flat._fqns[0]}: FullyShardedDataParallel has gathered its parameters, as within a "
            "forward, a backward or summon_full_params; attach and save between iterations"
        )
    replicas = getattr(unit, "_inter_node_pg", None)
    holders = () if replicas is None else ranks_of(replicas)
    if flat._params is None:
        yield flat, _of_flat(flat, handle.rank, holders)
        return
    _require_plain(flat)
    parts = zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True)
    for parameter, shape, info in parts:
        yield parameter, _of_slice(tuple(shape), info, holders)


def _of_slice(shape: tuple[int, ...], info: Any, holders: tuple[int, ...]) -> LocalShard:
    """Return the part of an original parameter in this rank's range."""
    boxes: list[Box] = []
    if info.in_shard:
        start = info.intra_param_start_idx
        boxes = flat_range_boxes(start, start + info.numel_in_shard, shape)
    return LocalShard(global_shape=shape, boxes=tuple(boxes), holders=holders)


def _of_flat(flat: Any, rank: int, holders: tuple[int, ...]) -> LocalShard:
    """This rank's range of a unit, without what pads the last ranges."""
    total, size = flat._unpadded_unsharded_size.numel(), flat._sharded_size.numel()
    start = min(rank * size, total)
    boxes = flat_range_boxes(start, min(start + size, total), (total,))
    return LocalShard(global_shape=(total,), boxes=tuple(boxes), holders=holders)


def _require_plain(flat: Any) -> None:
    """FSDP1 flattens by strides: only of contiguous plain tensors is that the order of elements."""
    for name, contiguous, extension in zip(
        flat._fqns, flat._contiguities, flat._param_extensions, strict=True
    ):
        if not contiguous or extension is not None:
            what = "is not contiguous" if extension is None else "is a DTensor"
            raise ConfigError(
                f"{name}: {what} inside FullyShardedDataParallel, so its slice is no part of it in "
                "the order of elements; make it contiguous before wrapping, or use fully_shard"
            )
