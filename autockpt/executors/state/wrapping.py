"""Wrappers of frameworks around optimizers and loaders, and the ones that can be taken off.

A wrapper that only looks like the wrapped object is saved wrongly, or never.  torch calls the hooks
of the optimizer inside, and a loader has methods that raise.  The tables name the wrappers by their
class, which is never imported.  A wrapper comes off where the training stays the same; the rest is
refused by name at `attach`.
"""

import copy
import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from autockpt.executors.state.data.loader_rng import preserve_rng
from autockpt.values.errors import ConfigError

OPTIMIZER_WRAPPERS = {
    "AcceleratedOptimizer": "optimizer",
    "_FabricOptimizer": "optimizer",
    "LightningOptimizer": "optimizer",
}
"""By class name the attribute with the optimizer inside."""

LOADER_WRAPPERS = {
    "DataLoaderShard": ("base_dataloader", "device"),
    "_FabricDataLoader": ("_dataloader", "_device"),
    "_WrappedDataLoader": ("_dataloader", "device"),
}
"""By class name the attributes with the loader inside and with the device that batches go to."""

REFUSED_LOADERS = {
    "DataLoaderDispatcher": "it reads batches on one rank for all",
    "MpDeviceLoader": "it reads ahead for an XLA device",
}
"""By class name why a loader cannot be resumed, neither as it is nor by the loader inside."""

_DEPTH = 8
"""Wrappers around wrappers."""

Moved = Callable[[Any], Any]
"""A batch where the wrapper would have put it."""


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer whose steps torch tells of; anything that is no known wrapper as it is."""
    for _ in range(_DEPTH):
        name = _known(optimizer, OPTIMIZER_WRAPPERS)
        inner = getattr(optimizer, OPTIMIZER_WRAPPERS[name], None) if name else None
        if inner is None or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def unwrapped_loader(loader: Any) -> tuple[Any, Moved]:
    """(the loader inside, how to put a batch on the wrapper's device).

    Raises ConfigError for a wrapper without which the training would be another one.
    """
    moves: list[Moved] = []
    for _ in range(_DEPTH):
        refused = _known(loader, REFUSED_LOADERS)
        if refused:
            raise _refusal(loader, REFUSED_LOADERS[refused])
        name = _known(loader, LOADER_WRAPPERS)
        if not name:
            break
        inside, place = LOADER_WRAPPERS[name]
        inner, device = getattr(loader, inside, None), getattr(loader, place, None)
        if inner is None or inner is loader:
            raise _refusal(loader, f"it has no loader in its attribute {inside}")
        _require_same_batches(loader)
        if device is not None:
            moves.append(_mover(device))
        loader = inner

    def move(batch: Any) -> Any:
        for one in moves:
            batch = one(batch)
        return batch

    return loader, move


def require_iterates(loader: "DataLoader[Any]") -> None:
    """Raises ConfigError for a DataLoader subclass that does not iterate as DataLoader does.

    Asked with an iterator of no batches, so that nothing is read and nothing drawn.
    """
    if type(loader).__iter__ is DataLoader.__iter__:
        return
    clone, asked = copy.copy(loader), []

    def nothing() -> Any:
        asked.append(True)
        return iter(())

    clone.__dict__["_iterator"] = None
    clone.__dict__["_get_iterator"] = nothing
    detail = ""
    try:
        with preserve_rng():
            next(iter(clone), None)
    except Exception as error:
        detail = f" (iterating it raised {error!r:.200})"
    if not asked:
        raise ConfigError(
            f"attach(data=...): a {type(loader).__qualname__} does not iterate as DataLoader does, "
            f"so batches cannot be skipped{detail}. Give it state_dict and load_state_dict, or "
            "attach the DataLoader inside it"
        )


def _require_same_batches(loader: Any) -> None:
    """Raises ConfigError where accelerate's loader does more than to move batches."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    several = several and torch.distributed.get_world_size() > 1
    if several and getattr(loader, "rng_types", None):
        raise _refusal(loader, "it makes the random states of all ranks equal at every epoch")
    if getattr(loader, "skip_batches", 0):
        raise _refusal(loader, f"it skips {loader.skip_batches} batches of every epoch")
    accumulation = getattr(getattr(loader, "gradient_state", None), "num_steps", 1)
    if isinstance(accumulation, int) and accumulation > 1:
        raise _refusal(
            loader, f"it ends an accumulation of {accumulation} iterations with the epoch"
        )


def _refusal(loader: Any, reason: str) -> ConfigError:
    kind = type(loader).__qualname__
    return ConfigError(
        f"attach(data=...): a {kind} cannot be resumed at a batch: {reason}; attach the DataLoader "
        "that the framework was given, or an object with state_dict and load_state_dict"
    )


def _known(wrapper: Any, table: Mapping[str, Any]) -> str:
    """The name in the table of its class or of one that it is derived from; "": none."""
    return next((kind.__name__ for kind in type(wrapper).__mro__ if kind.__name__ in table), "")


def _mover(device: Any) -> Moved:
    def move(value: Any) -> Any:
        if hasattr(value, "to"):
            return value.to(device)
        if isinstance(value, Mapping):
            return type(value)({key: move(item) for key, item in value.items()})  # type: ignore[call-arg]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(move, value))
        return type(value)(map(move, value)) if isinstance(value, list | tuple) else value

    return move


def unattached_schedulers(optimizers: Mapping[str, Optimizer], others: Iterable[Any]) -> list[str]:
    """Classes of the schedulers that set an optimizer's rates and are in no attached object.

    Looks through all objects of the process, so it is asked once.
    """
    attached: list[Any] = list(others)
    for one in attached:  # which grows
        held = getattr(one, "__dict__", {}).values()
        inner = [each for value in held for each in (value if type(value) is list else [value])]
        known = {id(each) for each in attached}
        attached += [each for each in inner if _is_scheduler(each) and id(each) not in known]
    known = {id(one) for one in attached}
    found = []
    for optimizer in optimizers.values():
        for one in gc.get_referrers(optimizer):
            owners = gc.get_referrers(one) if type(one) is dict else [one]
            found += [o for o in owners if _is_scheduler(o) and id(o) not in known]
    return sorted({type(one).__qualname__ for one in found})


def _is_scheduler(one: Any) -> bool:
    return issubclass(type(one), LRScheduler)
