"""Megatron's ShardedTensor: a module that tells with `sharded_state_dict` what its tensors are.

Recognised by attributes, never imported: key, data, global_shape, global_offset, local_shape,
prepend_axis_num, flattened_range.  Prepended axes number what the key does not, layers for
instance: they become a part of the name, `decoder.layers.mlp.linear_fc1.weight[7]`, which is the
same on any pipeline stage.  `replica_id` counts copies and names no ranks: no holder is known.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autockpt.executors.layout.boxes import Box, flat_range_boxes
from autockpt.executors.sharding.holdings import Holding
from autockpt.values.errors import ConfigError

_NEEDED = ("key", "data", "global_shape", "global_offset", "local_shape", "prepend_axis_num")


def of_megatron(module: torch.nn.Module) -> Iterator[tuple[torch.Tensor, Holding]]:
    """The holdings of the tensors that a module describes.  Raises ConfigError, see `placed`."""
    for sharded in _sharded_tensors(module):
        yield sharded.data, placed(sharded)[1]


def megatron_names(module: torch.nn.Module) -> dict[int, str]:
    """By id of a parameter its name in the whole model."""
    return {id(sharded.data): placed(sharded)[0] for sharded in _sharded_tensors(module)}


def placed(sharded: Any) -> tuple[str, Holding]:
    """(name, holding) of one ShardedTensor.  Raises ConfigError where its numbers do not fit."""
    axes = sharded.prepend_axis_num
    above, shape = sharded.global_offset[:axes], tuple(sharded.global_shape[axes:])
    inner = Box(offset=tuple(sharded.global_offset[axes:]), shape=tuple(sharded.local_shape))
    name = sharded.key + "".join(f"[{number}]" for number in above)
    flattened = getattr(sharded, "flattened_range", None)
    boxes = [inner]
    if flattened is not None:
        ranges = flat_range_boxes(flattened.start, flattened.stop, inner.shape)
        boxes = [box.moved(inner.offset) for box in ranges]
    holding = Holding(global_shape=shape, boxes=tuple(box for box in boxes if box.count))
    if holding.count != sharded.data.numel():
        raise ConfigError(
            f"{name}: its ShardedTensor describes {holding.count} elements, local shape "
            f"{inner.shape}, and holds {sharded.data.numel()}; correct sharded_state_dict"
        )
    return name, holding


def _sharded_tensors(module: torch.nn.Module) -> Iterator[Any]:
    describe = getattr(module, "sharded_state_dict", None)
    if callable(describe):
        yield from _leaves(describe())


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        for value in data.values():
            yield from _leaves(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _leaves(value)
    elif all(hasattr(data, name) for name in _NEEDED) and isinstance(data.data, torch.Tensor):
        yield data
