"""Optimizers whose state is divided over ranks while the parameters are not, or otherwise.

torch's ZeroRedundancyOptimizer lists all parameters in its groups.  It steps this rank's parameters
in an inner optimizer that holds their state, and broadcasts the results.  The division follows from
the sizes of the parameters and the number of ranks: with another number a rank owns other
parameters' state.  DeepSpeed's is seen through `ZeroView`.
"""

from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

import torch

from autockpt.executors.sharding.adapters.zero_optimizer import ZeroView
from autockpt.executors.sharding.local_shard import LocalShard, follow, whole_of
from autockpt.values.errors import ConfigError


def state_of(optimizer: torch.optim.Optimizer) -> MutableMapping[Any, Any]:
    """Where the state of this rank's parameters stands, by parameter.

    Raises ConfigError when the optimizer has not decided yet which those are.
    """
    if not _is_redundancy(optimizer):
        return optimizer.state
    inner = getattr(optimizer, "optim", None)
    if inner is None:
        raise ConfigError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) divides its parameters in the first "
            "iterations; attach after them, or pass overlap_with_ddp=False"
        )
    state: MutableMapping[Any, Any] = inner.state
    return state


def owns_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """This rank has optimizer state of a parameter of `param_groups`.

    Raises ConfigError when the optimizer has not decided yet.
    """
    if isinstance(optimizer, ZeroView):
        return optimizer.part(parameter) is not None
    if not _is_redundancy(optimizer):
        return True
    state_of(optimizer)
    zero: Any = optimizer
    return bool(zero._param_to_rank[parameter] == zero.rank)


def held_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, declared: LocalShard
) -> LocalShard:
    """Return this rank's holding of optimizer state, from the parameter's own holding.

    Copies of a parameter have copies of its state, unless the optimizer divides it.
    """
    if isinstance(optimizer, ZeroView):
        part = optimizer.part(parameter)
        return replace(declared, boxes=(), holders=()) if part is None else part.holding
    return replace(declared, holders=()) if _is_redundancy(optimizer) else declared


def state_holding(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    state: torch.Tensor,
    declared: LocalShard | None,
) -> LocalShard | None:
    """Return this rank's holding of a tensor of optimizer state; None: unknown.

    `declared`: the known holding of the parameter, None for a DTensor, which declares its own.
    """
    known = None if declared is None else held_state(optimizer, parameter, declared)
    if isinstance(optimizer, ZeroView) and known is not None:
        return known if state.dim() else whole_of(state)
    return follow(state, parameter, known)


def is_divided(optimizer: torch.optim.Optimizer) -> bool:
    """Ranks have the state of different parameters, or of other parts than they have of those."""
    return isinstance(optimizer, ZeroView) or _is_redundancy(optimizer)


def steps_as(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose step changes the parameters."""
    return optimizer.inner if isinstance(optimizer, ZeroView) else optimizer


def _is_redundancy(optimizer: torch.optim.Optimizer) -> bool:
    # Asked of the class: reading the property divides the parameters, for good.
    return hasattr(type(optimizer), "_param_to_rank")
