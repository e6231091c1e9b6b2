"""The input of an image's layout: name, form and place in the whole of every tensor."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from autockpt.executors.image.dtypes import dtype_name, stored_form
from autockpt.executors.image.layout.boxes import overlaps
from autockpt.executors.image.layout.dedup import Range
from autockpt.executors.image.layout.plan import TensorSpec
from autockpt.executors.sharding.local_shard import LocalShard, holding_of
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.tensor_index import local_part, memory_of


def describe(
    lazy: dict[str, torch.Tensor],
    boundary: dict[str, torch.Tensor],
    classes: LiveState,
    parts: Mapping[str, str] | None = None,
    holdings: Mapping[str, LocalShard] | None = None,
    ranges: Mapping[str, Range] | None = None,
) -> tuple[list[TensorSpec], dict[str, str]]:
    """(specs, aliases): tensors on the same bytes are stored once, the first name wins.

    `parts`: by name, the optimizer that changes a tensor.  `holdings`: by name, its part of a
    whole, when it is one.  `ranges`: by name, the elements that this rank stores, if not all.
    """
    parts, holdings, ranges = parts or {}, holdings or {}, ranges or {}
    specs: list[TensorSpec] = []
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for group, is_lazy in ((lazy, True), (boundary, False)):
        for name, tensor in group.items():
            local = local_part(tensor, holdings.get(name))
            key = (
                memory_of(name, local), local.storage_offset(), tuple(local.shape),
                tuple(local.stride()), dtype_name(local.dtype),
            )  # fmt: skip
            if local.numel() and key in seen:
                aliases[name] = seen[key]
                continue
            seen[key] = name
            spec = _spec(name, local, is_lazy, classes.tensor_class(name, tensor))
            holding = holdings.get(name) or holding_of(tensor)
            stored = ranges.get(name, (0, local.numel()))
            if holding is not None and stored != (0, local.numel()):
                spec = _cut(spec, local, holding, stored)
            elif holding is not None:
                spec = replace(spec, global_shape=holding.global_shape, boxes=holding.boxes)
            specs.append(replace(spec, part=parts.get(name, "")))
    return specs, aliases


def _spec(name: str, local: torch.Tensor, lazy: bool, tensor_class: str) -> TensorSpec:
    dtype, shape = stored_form(local.dtype, tuple(local.shape))
    return TensorSpec(
        name=name, dtype=dtype, shape=shape, true_dtype=dtype_name(local.dtype), lazy=lazy,
        tensor_class=tensor_class,
    )  # fmt: skip


def _cut(spec: TensorSpec, local: torch.Tensor, holding: LocalShard, stored: Range) -> TensorSpec:
    """Of a range of the elements; they stand one after another, so it has one dimension."""
    _, shape = stored_form(local.dtype, (stored[1] - stored[0],))
    boxes = tuple(part.box for part in overlaps(holding.boxes, *stored))
    return replace(spec, shape=shape, global_shape=holding.global_shape, boxes=boxes)
