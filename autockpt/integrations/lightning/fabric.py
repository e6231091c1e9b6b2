"""Fabric: the dict that `fabric.save` takes, and loaders of `fabric.setup_dataloaders`.

    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    ckpt = attach(fabric, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    loader = ckpt.loader(loader)
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            ...
            ckpt.step()
    ckpt.close()

The page docs/howto/frameworks/lightning.md tells more.
"""

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

import autockpt
from autockpt.integrations.adapters import OverLoader, OverSession
from autockpt.integrations.lightning.ranks import tell_ranks
from autockpt.values.errors import ConfigError

_PLAIN = (bool, int, float, str, type(None))


def attach(fabric: Any, state: MutableMapping[str, Any], **attach: Any) -> "ProtectedFabric":
    """Restores what is in `state`, and checkpoints it from now on.

    `state`: modules, optimizers and objects with `state_dict` and `load_state_dict` by name, as for
    `fabric.save`; numbers and strings in it are put back into it.  Call it behind `fabric.setup`.
    `attach` takes what `autockpt.attach` does.  Raises ConfigError for what cannot be saved.
    """
    modules: dict[str, torch.nn.Module] = {}
    optimizers: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in state.items():
        inner = _inner(value)
        if isinstance(inner, torch.nn.Module):
            modules[name] = inner
        elif isinstance(inner, torch.optim.Optimizer):
            optimizers[name] = inner
        elif not isinstance(value, _PLAIN):
            others[name] = value
    if not modules:
        raise ConfigError(
            "autockpt.integrations.lightning.attach: expected a module among "
            f"{', '.join(state) or 'no names'}; give the dict that fabric.save takes"
        )
    tell_ranks(fabric)
    values = _Values(fabric, state)
    session = autockpt.attach(
        model=modules, optimizer=optimizers, fabric=values, restore="tensors", **others, **attach
    )
    session.own_boundary()
    return ProtectedFabric(session)


class ProtectedFabric(OverSession):
    """The session of a loop that is the script's, with loaders that are Fabric's."""

    def __init__(self, session: Any) -> None:
        self.session = session
        """The session that `autockpt.attach` returned."""
        self._loaders = 0

    def loader(self, loader: Any) -> "FabricLoader":
        """A loader of `setup_dataloaders` that knows its place; one pass is one epoch.

        Call it for each loader of the training, in the same order at every start.
        Raises ConfigError for one that cannot be resumed at a batch.
        """
        name, self._loaders = f"loader{self._loaders}", self._loaders + 1
        return FabricLoader(loader, self.session.loader(loader, name=name))


class FabricLoader(OverLoader):
    """Fabric's loader, which tells a distributed sampler the epoch."""

    def __init__(self, loader: Any, placed: Any) -> None:
        super().__init__(placed)
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch of the checkpoint, else a whole one."""
        self._placed.end_left_epoch()
        for sampler in _samplers(getattr(self._loader, "_dataloader", self._loader)):
            sampler.set_epoch(self._placed.epoch)
        return iter(self._placed)


class _Values:
    """Numbers and strings of the script's dict, and the state of Fabric's precision."""

    def __init__(self, fabric: Any, state: MutableMapping[str, Any]) -> None:
        self._precision, self._state = fabric._precision, state

    def state_dict(self) -> dict[str, Any]:
        """As of now."""
        values = {name: value for name, value in self._state.items() if isinstance(value, _PLAIN)}
        return {"values": values, "precision": self._precision.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the script's dict."""
        self._state.update(state["values"])
        if state["precision"]:
            self._precision.load_state_dict(state["precision"])


def _inner(value: Any) -> Any:
    """Return the object inside a wrapper of Fabric or torch.compile."""
    value = getattr(value, "_orig_mod", value)
    if type(value).__name__ == "_FabricModule":
        value = value._forward_module
        return getattr(value, "_orig_mod", value)
    return getattr(value, "optimizer", value) if _is_optimizer(value) else value


def _is_optimizer(value: Any) -> bool:
    return any(kind.__name__ == "_FabricOptimizer" for kind in type(value).__mro__)


def _samplers(loader: Any) -> list[Any]:
    """Return the samplers that shuffle by the epoch, as Fabric finds them."""
    batches = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    return [one for one in found if callable(getattr(one, "set_epoch", None))]
