"""Megatron's ShardedTensor: a module that tells with `sharded_state_dict` what its tensors are.

Recognised by attributes, never imported: key, data, global_shape, global_offset, local_shape,
prepend_axis_num, flattened_range.  Prepended axes number things that the key does not, such as
layers.  They become a part of the name, `decoder.layers.mlp.linear_fc1.weight[7]`, which is the
same on any pipeline stage.  A factory (SwiGLU) describes one parameter by several of them.
`replica_id` counts copies and names no ranks: no other holder is known.

The attributes were read in Megatron-LM's source; nothing was run with it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autockpt.executors.image.layout.boxes import Box, flat_range_boxes
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.values.errors import ConfigError

_NEEDED = ("key", "data", "global_shape", "global_offset", "local_shape", "prepend_axis_num")


def of_megatron(module: torch.nn.Module) -> Iterator[tuple[torch.Tensor, LocalShard]]:
    """The holdings of the parameters that a module describes.  Raises ConfigError, see `placed`."""
    for parameter, _, holding in _described(module):
        yield parameter, holding


def megatron_names(module: torch.nn.Module) -> dict[int, str]:
    """By id of a parameter its name in the whole model.  Raises ConfigError, see `placed`."""
    return {id(parameter): name for parameter, name, _ in _described(module)}


def placed(sharded: Any) -> tuple[str, LocalShard]:
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
    holding = LocalShard(global_shape=shape, boxes=tuple(box for box in boxes if box.count))
    if holding.count != sharded.data.numel():
        raise ConfigError(
            f"{name}: its ShardedTensor describes {holding.count} elements, local shape "
            f"{inner.shape}, and holds {sharded.data.numel()}; correct sharded_state_dict"
        )
    return name, holding


def _described(module: torch.nn.Module) -> Iterator[tuple[torch.Tensor, str, LocalShard]]:
    """(parameter, its name in the whole model, holding): `data` may be a detached view of it."""
    describe = getattr(module, "sharded_state_dict", None)
    if not callable(describe):
        return
    alive = [*module.parameters(), *module.buffers()]
    known = {_memory(tensor): tensor for tensor in reversed(alive) if tensor.numel()}
    for leaf in _leaves(describe()):
        parameter = known.get(_memory(leaf.data))
        joined = None if parameter is None else _joined(parameter, leaf)
        if parameter is not None and joined is not None:
            yield parameter, *joined


def _joined(parameter: torch.Tensor, leaf: Any) -> tuple[str, LocalShard] | None:
    """(name, holding) of a ShardedTensor or a factory; None for one that needs a rule.

    A factory may name its parts separately, or rearrange them.  Then the parameter is no part of
    one global tensor in the order of its memory.
    """
    if not _is_factory(leaf):
        return placed(leaf)
    address, parts = parameter.data_ptr(), []
    for sharded in _leaves(leaf.build()):
        if sharded.data.data_ptr() != address or not sharded.data.is_contiguous():
            return None
        address += sharded.data.nbytes
        parts.append(placed(sharded))
    names = {(name, holding.global_shape) for name, holding in parts}
    if len(names) != 1 or address != parameter.data_ptr() + parameter.nbytes:
        return None
    ((name, shape),) = names
    boxes = tuple(box for _, holding in parts for box in holding.boxes)
    return name, LocalShard(global_shape=shape, boxes=boxes)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _leaves(data: Any) -> Iterator[Any]:
    """ShardedTensors and their factories in nested dicts and lists."""
    if isinstance(data, Mapping):
        for value in data.values():
            yield from _leaves(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _leaves(value)
    elif isinstance(getattr(data, "data", None), torch.Tensor) and (
        _is_factory(data) or all(hasattr(data, name) for name in _NEEDED)
    ):
        yield data


def _is_factory(data: Any) -> bool:
    return hasattr(data, "build_fn") and callable(getattr(data, "build", None))
