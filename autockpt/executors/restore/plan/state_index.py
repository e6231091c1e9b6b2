"""The state of one rank without its memory: names, shapes, parts and optimizers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autockpt.executors.sharding.adapters.zero_optimizer import ZeroView
from autockpt.executors.sharding.fqns import has_extra_state
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.executors.sharding.optimizers import held_state
from autockpt.executors.state.live_state import LiveState, local_part

Form = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Shape, and the strides of a tensor that is not contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A parameter or buffer."""

    holding: LocalShard
    whole_shape: tuple[int, ...]
    """The shape of the tensor itself."""
    shape: tuple[int, ...]
    """The shape of the local part, without its padding."""
    dtype: torch.dtype
    number: int
    """Equal for two names of one tensor."""
    place: object
    """Equal for two names of the same memory."""
    in_place: bool
    """Bytes may be read straight into its memory."""
    is_buffer: bool
    is_placed: bool
    """A rule says which part of the whole it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveParameter:
    """A parameter as one of its optimizers sees it."""

    holding: LocalShard
    state_holding: LocalShard
    """The holding of state in the form of the parameter."""
    state_form: Form
    """The form of such state on this rank, padding included."""
    whole_shape: tuple[int, ...]
    has_state: bool
    """This rank has the optimizer state of the parameter."""
    is_placed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptimizer:
    """An attached optimizer, or one inside it."""

    groups: tuple[tuple[str, ...], ...]
    """Names of the parameters, by parameter group."""
    parameters: Mapping[str, LiveParameter]

    def owned(self) -> dict[str, LiveParameter]:
        """The parameters whose state this rank has, by name."""
        return {name: one for name, one in self.parameters.items() if one.has_state}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateIndex:
    """Everything that a plan has to know of the live state of one rank."""

    tensors: Mapping[str, LiveTensor]
    """Parameters first, then buffers."""
    optimizers: Mapping[str, LiveOptimizer]
    models: tuple[str, ...]
    """Prefixes of the names of their tensors."""
    passing: frozenset[str]
    """Buffers that do not persist, also where one is None now."""
    extra_states: frozenset[str]
    """Names of the modules that have a state beside tensors."""
    drifting: Mapping[str, int]
    """By name how many copies of an averaged parameter there are."""
    mesh: str
    """Equal where parameters are divided and replicated alike."""
    exact: bool
    """Tensors that this rank does not take are taken by no rank."""

    @classmethod
    def of(cls, state: LiveState, world_size: int) -> "StateIndex":
        """The index of a live state, on one of `world_size` ranks that restore.

        Raises ConfigError for a tensor that a wrapper has gathered.
        """
        parameters, buffers = state.parameters(), state.buffers()
        tensors = {n: _tensor(state, t, is_buffer=False) for n, t in parameters.items()}
        tensors |= {n: _tensor(state, t, is_buffer=True) for n, t in buffers.items()}
        extra = state.extra_places().items()
        return cls(
            tensors=tensors,
            optimizers={
                prefix: _optimizer(state, optimizer)
                for prefix, optimizer in state.optimizers.items()
            },
            models=tuple(state.models),
            passing=frozenset(state.passing_buffers()),
            extra_states=frozenset(path for path, module in extra if has_extra_state(module)),
            drifting=state.drifting,
            mesh=state.mesh(),
            exact=world_size == 1 or state.is_alike(world_size),
        )


def _tensor(state: LiveState, tensor: torch.Tensor, *, is_buffer: bool) -> LiveTensor:
    holding = state.holding(tensor)
    local = local_part(tensor, holding)
    shape = tuple(local.shape)
    place = (local.data_ptr(), shape, local.stride(), local.dtype) if local.numel() else None
    return LiveTensor(
        holding=holding,
        whole_shape=tuple(tensor.shape),
        shape=shape,
        dtype=local.dtype,
        number=id(tensor),
        place=place,
        in_place=local.device.type == "cpu" and local.is_contiguous(),
        is_buffer=is_buffer,
        is_placed=state.is_placed(tensor),
    )


def _optimizer(state: LiveState, optimizer: torch.optim.Optimizer) -> LiveOptimizer:
    named = [
        {state.name_of(parameter): parameter for parameter in group["params"]}
        for group in optimizer.param_groups
    ]
    parameters = {name: p for group in named for name, p in group.items()}
    return LiveOptimizer(
        groups=tuple(tuple(state.name_of(p) for p in g["params"]) for g in optimizer.param_groups),
        parameters={name: _parameter(state, optimizer, p) for name, p in parameters.items()},
    )


def _parameter(
    state: LiveState, optimizer: torch.optim.Optimizer, parameter: torch.Tensor
) -> LiveParameter:
    own = state.holding(parameter)
    held = held_state(optimizer, parameter, own)
    divided = isinstance(optimizer, ZeroView)
    # Of nothing, too: no rows of 6 elements are no row of no elements.
    form = ((held.count,), None) if divided else _form_of(local_part(parameter))
    return LiveParameter(
        holding=own,
        state_holding=held,
        state_form=form,
        whole_shape=tuple(parameter.shape),
        has_state=state.has_state(optimizer, parameter),
        is_placed=state.is_placed(parameter),
    )


def _form_of(local: torch.Tensor) -> Form:
    """Of the state of a parameter, as torch's optimizers make it: with its memory format.

    A fused step walks through the memory of both and does not look at strides.
    """
    shape = tuple(local.shape)
    # Not `is_contiguous`, which does not look at dimensions of one element.
    plain = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
    if local.stride() == plain:
        return shape, None
    made = torch.empty_strided(shape, local.stride(), dtype=torch.uint8, device="meta")
    strides = torch.empty_like(made).stride()
    return shape, None if strides == plain else strides
