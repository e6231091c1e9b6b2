"""Objects shaped like DeepSpeed's ZeRO optimizers, with the attributes that 0.19.8 showed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

Rank = tuple[Any, nn.Module]
"""The optimizer and the model of one rank."""


def model_of(shapes: list[tuple[int, ...]]) -> tuple[nn.Module, list[np.ndarray]]:
    """Parameters of these shapes and their values, all different."""
    module, values, base = nn.Module(), [], 0
    for i, shape in enumerate(shapes):
        value = np.arange(base, base + np.prod(shape), dtype=np.float32).reshape(shape)
        module.register_parameter(f"p{i}", nn.Parameter(torch.from_numpy(value.copy())))
        values.append(value)
        base += value.size
    return module, values


def adam(flats: list[torch.Tensor]) -> Any:
    """The inner optimizer after some steps: moments in the form of the flat partitions."""
    state = {flat: {"step": torch.tensor(3.0), "exp_avg": flat * 2, "count": 3} for flat in flats}
    groups = [{"lr": 0.1, "params": [flat]} for flat in flats]
    return SimpleNamespace(state=state, param_groups=groups)


def zero_2(shapes: list[tuple[int, ...]], rank: int, count: int) -> Rank:
    """One flat group, cut into equal ranges; the last is padded."""
    module, values = model_of(shapes)
    flat = np.concatenate([value.ravel() for value in values])
    size = -(-flat.size // count)
    padded = np.concatenate([flat, np.full(size * count - flat.size, -1, np.float32)])
    own = torch.from_numpy(padded[rank * size : (rank + 1) * size].copy())
    begin = 0
    for parameter in module.parameters():
        low, high = max(begin, rank * size), min(begin + parameter.numel(), (rank + 1) * size)
        parameter._hp_mapping = None  # type: ignore[attr-defined]
        if high > low:
            address = {"numel": high - low, "start": low - begin}
            place = {"numel": high - low, "start": low - rank * size}
            parameter._hp_mapping = SimpleNamespace(  # type: ignore[attr-defined]
                param_group_index=0,
                lp_fragment_address=SimpleNamespace(**address),
                hp_fragment_address=SimpleNamespace(**place),
            )
        begin += parameter.numel()
    optimizer = SimpleNamespace(
        single_partition_of_fp32_groups=[own], optimizer=adam([own]),
        bit16_groups=[list(module.parameters())],
    )  # fmt: skip
    return optimizer, module


def zero_3(shapes: list[tuple[int, ...]], rank: int, count: int) -> Rank:
    """Every parameter cut by itself, padded, the parts laid one after another."""
    module, values = model_of(shapes)
    parts, positions, begin = [], {}, 0
    for number, (parameter, value) in enumerate(zip(module.parameters(), values, strict=True)):
        size = -(-value.size // count)
        padded = np.full(size * count, -1, np.float32)
        padded[: value.size] = value.ravel()
        known: Any = parameter
        known.data = torch.empty(0)
        known.ds_shape, known.ds_numel, known.number = value.shape, value.size, number
        known.ds_tensor = torch.from_numpy(padded[rank * size : (rank + 1) * size].copy())
        known.ds_zero_partition_rank = rank
        parts.append(known.ds_tensor.clone())
        positions[number] = [0, begin, size]
        begin += size
    flat = torch.cat(parts)
    optimizer = SimpleNamespace(
        fp32_partitioned_groups_flat=[flat], optimizer=adam([flat]), grad_position=positions,
        fp16_groups=[list(module.parameters())], sub_group_to_group_id={0: 0},
        get_param_id=lambda parameter: parameter.number,
        _swappable_optimizer_subgroup=lambda group: False,
    )  # fmt: skip
    return optimizer, module
