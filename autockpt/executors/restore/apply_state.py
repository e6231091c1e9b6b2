"""Put the restored state into optimizers, modules and objects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autockpt.executors.restore.plan.saved_optimizer import SavedGroup, SavedOptimizer
from autockpt.executors.sharding.optimizers import state_of
from autockpt.executors.state import state_tree
from autockpt.executors.state.data.loader_rng import load_without_rng_draw
from autockpt.executors.state.live_state import Dispensable, LiveState
from autockpt.values.errors import ConfigError, CorruptCheckpointError


@dataclass(slots=True)
class RestoredState:
    """The state from the shards beside the tensors that are in place already."""

    skeleton: Any
    """The skeleton of the home shard; its optimizers stand in `optimizers`."""
    optimizers: dict[str, SavedOptimizer]
    tensors: dict[str, torch.Tensor]
    """Optimizer state and private tensors, in new host memory."""
    placed: frozenset[str]
    """Optimizer state that is divided as its parameter is."""
    by_rank: dict[int, dict[str, Any]]
    """{"progress", "rng"} of every rank that wrote, when ranks or mesh are others; else empty."""
    exact: bool
    """Nothing but the home shard was needed, and it was written by a rank like this one."""
    bytes: int
    as_built: tuple[str, ...] = ()
    """Buffers that do not persist and are not what was saved."""
    awaited: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None
    """Shape and type of the parameters and buffers that the script builds in its loop, and did not
    build yet; None: all is there."""


def apply_state(restored: RestoredState, state: LiveState) -> dict[str, Any]:
    """Puts optimizers, modules' extras and stateful objects back; (progress, rng) for the session.

    Optimizers and extras wait for parts that the script builds later.  Raises ConfigError naming
    what does not fit any more.
    """
    skeleton, tensors, device = restored.skeleton, restored.tensors, state.device()
    if restored.awaited is None:
        apply_structure(restored, state)
    missing = sorted(set(state.others) - set(skeleton["others"]))
    strict = [name for name in missing if not isinstance(state.others[name], Dispensable)]
    if strict and not skeleton.get("partial"):
        raise ConfigError(f"{strict[0]}: is not in the checkpoint; it was attached later")
    for name, value in state.others.items():
        if name not in missing:
            _apply_other(value, skeleton["others"][name], tensors, device)
        elif isinstance(value, Dispensable) and not skeleton.get("partial"):
            value.is_absent("is not in the checkpoint")
    return {
        "progress": state_tree.decode(skeleton["progress"], tensors, to_train=True),
        "rng": state_tree.decode(skeleton["rng"], tensors, to_train=True),
    }


def _apply_other(
    value: Any, saved: Any, tensors: dict[str, torch.Tensor], device: torch.device | None
) -> None:
    try:
        decoded = state_tree.decode(saved, tensors, device, to_train=True)
    except ConfigError as error:
        if not isinstance(value, Dispensable):
            raise
        value.is_absent(str(error))
        return
    load_without_rng_draw(value, decoded)


def apply_structure(restored: RestoredState, state: LiveState) -> None:
    """Puts optimizers and modules' extras back.  Raises ConfigError naming what does not fit."""
    skeleton, tensors = restored.skeleton, restored.tensors
    for prefix in restored.optimizers:
        _apply_optimizer(state, prefix, state.optimizers[prefix], restored)
    device = state.device()
    own = skeleton.get("own", {})
    if restored.by_rank and own and not all(map(_is_whole(state), state.parameters().values())):
        raise ConfigError(
            f"{next(iter(own))}: keeps state of its own, whose division over ranks is not known. "
            "Resume with the ranks and the mesh that wrote the checkpoint"
        )
    state.load_own(
        own,
        lambda saved: state_tree.decode(saved, tensors, device, to_train=True),
        lambda prefix: _apply_again(state, prefix, restored),
    )
    for path, module in state.extra_places().items():
        if path in skeleton["modules"]:
            saved = skeleton["modules"][path]
            module.set_extra_state(state_tree.decode(saved, tensors, device, to_train=True))
    state.module_state.load(
        skeleton.get("changed", {}),
        lambda saved: state_tree.decode(saved, tensors, device, to_train=True),
    )


def _is_whole(state: LiveState) -> Callable[[torch.Tensor], bool]:
    return lambda parameter: state.holding(parameter).is_whole


def _apply_again(state: LiveState, prefix: str, restored: RestoredState) -> None:
    """An optimizer and those inside it, which its `load_state_dict` may have changed."""
    for name in restored.optimizers:
        if name == prefix or name.startswith(f"{prefix}."):
            _apply_optimizer(state, name, state.optimizers[name], restored)


def left_as_built(restored: RestoredState, state: LiveState) -> tuple[str, ...]:
    """Return sentences about state that is as the script built it.

    A partial image, from another system, lacks some attached optimizers and objects; buffers that
    do not persist may not fit.
    """
    skeleton, said = restored.skeleton, []
    if skeleton.get("partial"):
        attached = ((state.optimizers, skeleton["optimizers"]), (state.others, skeleton["others"]))
        absent = [name for names, saved in attached for name in names if name not in saved]
        if absent:
            names = ", ".join(absent)
            said.append(f"the checkpoint has nothing of {names}: as the script built it")
    if restored.as_built:
        said.append(
            f"{len(restored.as_built)} buffers that do not persist do not fit the checkpoint, "
            f"first {restored.as_built[0]}: as the model made them"
        )
    return tuple(said)


def _apply_optimizer(
    state: LiveState, prefix: str, optimizer: torch.optim.Optimizer, restored: RestoredState
) -> None:
    """Writes state and groups directly: `load_state_dict` casts fp32 moments of bf16 weights."""
    saved, tensors = restored.optimizers[prefix], restored.tensors
    named = [
        {state.name_of(parameter): parameter for parameter in group["params"]}
        for group in optimizer.param_groups
    ]
    for number, (group, names) in enumerate(zip(optimizer.param_groups, named, strict=True)):
        its = _saved_group(prefix, saved, tuple(names), number, len(named), exact=restored.exact)
        settings = state_tree.decode(its.values, tensors, _device(group["params"]), to_train=True)
        _require_same_settings(prefix, optimizer, set(group) - {"params"}, set(settings))
        group.update(settings)
    live = state_of(optimizer)
    live.clear()
    every = ((name, parameter) for names in named for name, parameter in names.items())
    for name, parameter in ((n, p) for n, p in every if state.has_state(optimizer, p)):
        if name in saved.keys:
            live[parameter] = {
                key: _placed(restored, f"{prefix}.{name}.{key}", parameter, on_device=on_device)
                for key, on_device in saved.keys[name]
            }
        elif name in saved.irregular:
            values = saved.irregular[name]
            own = {n: _divided(restored, n, parameter) for n in state_tree.tensor_names(values)}
            live[parameter] = _as_parts(
                state_tree.decode(values, own, parameter.device, to_train=True), parameter
            )
    # A COMMIT of before this existed has none.
    live.update(state_tree.decode(saved.loose, tensors, state.device(), to_train=True))


def _as_parts(values: Any, parameter: torch.Tensor) -> Any:
    """Optimizer state, in which a compound is this rank's part if the parameter is one."""
    if not hasattr(parameter, "to_local") or not isinstance(values, dict):
        return values
    from torch.distributed.tensor import DTensor

    whole: Any = parameter
    local = tuple(whole.to_local().shape)
    return {
        key: DTensor.from_local(
            value, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
        )
        if isinstance(value, torch.Tensor)
        and state_tree.compound_of(value) is value
        and tuple(value.shape) == local
        else value
        for key, value in values.items()
    }


def _saved_group(
    prefix: str,
    saved: SavedOptimizer,
    names: tuple[str, ...],
    number: int,
    groups: int,
    *,
    exact: bool,
) -> SavedGroup:
    """Return a group's settings: of the same group, or of the group with these parameters."""
    own = saved.groups[: saved.own_groups]
    if len(own) == groups and own[number].names == names:
        return own[number]
    found = None if exact else saved.group_of(names)
    if found is not None:
        return found
    if len(own) != groups:
        raise ConfigError(
            f"{prefix}: has {groups} parameter groups, the checkpoint {len(own)}; build it with "
            "the same groups"
        )
    raise ConfigError(
        f"{prefix}: its parameter groups differ from the checkpoint's; build it from the same "
        "parameters in the same groups"
    )


def _require_same_settings(
    prefix: str, optimizer: torch.optim.Optimizer, now: set[str], saved: set[str]
) -> None:
    """Another version may add settings and a scheduler drop some; both at once is another kind."""
    if saved - now and now - saved:
        raise ConfigError(
            f"{prefix}: a {type(optimizer).__qualname__} with {', '.join(sorted(now - saved))} "
            f"cannot go on from the checkpoint, whose optimizer has "
            f"{', '.join(sorted(saved - now))}. Use --fresh to start over, or the code that wrote "
            "it"
        )


def _placed(
    restored: RestoredState, name: str, parameter: torch.Tensor, *, on_device: bool
) -> torch.Tensor:
    if name not in restored.tensors:
        raise CorruptCheckpointError(f"{name}: is named in the state and not in the image")
    tensor = restored.tensors[name]
    if restored.awaited is not None and tensor.shape == parameter.shape:
        form = torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device)
        tensor = form.copy_(tensor)  # in the memory format of its parameter
    return _divided(restored, name, parameter, tensor.to(parameter.device) if on_device else tensor)


def _divided(
    restored: RestoredState, name: str, parameter: torch.Tensor, tensor: torch.Tensor | None = None
) -> torch.Tensor:
    """State in the form of a DTensor parameter is a DTensor as well."""
    tensor = restored.tensors[name] if tensor is None else tensor
    if name not in restored.placed or not hasattr(parameter, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor.to(parameter.device), parameter.device_mesh,
        parameter.placements,  # type: ignore[attr-defined]  # a DTensor
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def _device(parameters: list[torch.Tensor]) -> torch.device | None:
    return parameters[0].device if parameters else None
