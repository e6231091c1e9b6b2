"""Names that every kind of wrapper and every number of pipeline stages agrees on.

A parameter is called what it is called in the bare model.  Wrappers put their own words into the
name; a hand-made pipeline stage counts its layers from 0 again.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autockpt.values.errors import ConfigError

_WRAPPING = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""torch.compile, FSDP1, activation checkpointing (checkpoint_wrapper): anywhere in a name."""


def plain_fqn(name: str) -> str:
    """A parameter's name in the bare model.

    `module.` is taken off at the front only (DDP, DeepSpeed engine): inside, it may be the model's
    own word.
    """
    words = [word for word in name.split(".") if word not in _WRAPPING]
    while len(words) > 1 and words[0] == "module":
        del words[0]
    return ".".join(words)


class Assembled(torch.nn.Module):
    """The parts of a model that this rank has, under their names in the whole model.

    For `attach` only: it calls nothing and owns nothing.  Parts without a path have global names
    already; several of them are laid over one another::

        Assembled(stage_0.submod, stage_3.submod)
        Assembled(at={"layers.4": block_4, "layers.5": block_5}, wrappers=[ddp_of_both])
    """

    def __init__(
        self,
        *parts: torch.nn.Module,
        at: Mapping[str, torch.nn.Module] | None = None,
        wrappers: Iterable[torch.nn.Module] = (),
    ) -> None:
        """`wrappers`: what knows how parts of `at` are divided, where the parts are inside of it.

        Raises ConfigError when two parts claim one name.
        """
        super().__init__()
        placed = [*(("", part) for part in parts), *(at or {}).items()]
        # Whoever keeps DDP alive keeps gloo's threads alive past the end.
        self._given = tuple(weakref.ref(m) for m in (*(part for _, part in placed), *wrappers))
        for path, part in placed:
            _put(self, path.split(".") if path else [], bare(part), path)

    @property
    def parts(self) -> tuple[torch.nn.Module, ...]:
        """As given, wrappers included, as far as the script still has them."""
        return tuple(part for ref in self._given if (part := ref()) is not None)


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel; everything else as it is."""
    while isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    return module


def _put(into: torch.nn.Module, path: list[str], part: torch.nn.Module, where: str) -> None:
    if not path:
        _lay_over(into, part, where)
        return
    first, *rest = path
    there = into._modules.get(first)
    if not rest and there is None:
        into._modules[first] = part
        return
    place = _Place() if there is None else _own_place(there, where)
    into._modules[first] = place
    _put(place, rest, part, where)


class _Place(torch.nn.Module):
    """A name between the model and its parts."""


def _own_place(module: torch.nn.Module, where: str) -> torch.nn.Module:
    """A place that may be added to: never a module of the model itself."""
    if isinstance(module, _Place):
        return module
    place = _Place()
    _lay_over(place, module, where)
    return place


def _lay_over(into: torch.nn.Module, part: torch.nn.Module, where: str) -> None:
    """Adds the tensors and modules of a part to a place."""
    tensors: tuple[tuple[dict[str, Any], Mapping[str, Any]], ...] = (
        (into._parameters, part._parameters),
        (into._buffers, part._buffers),
    )
    for known, more in tensors:
        for name, tensor in more.items():
            if tensor is not None and known.setdefault(name, tensor) is not tensor:
                raise ConfigError(_twice(where, name))
    # A buffer that is not persistent stays so.
    into._non_persistent_buffers_set |= part._non_persistent_buffers_set
    for name, child in part._modules.items():
        there = into._modules.get(name)
        if there is None:
            into._modules[name] = child
        elif child is not None and child is not there:
            path = f"{where}.{name}".lstrip(".")
            into._modules[name] = place = _own_place(there, path)
            _lay_over(place, child, path)


def _twice(where: str, name: str) -> str:
    path = f"{where}.{name}".lstrip(".")
    return (
        f"Assembled: two parts have a tensor {path!r}; give each its path in the whole model: "
        'Assembled(at={"layers.4": stage_0, "layers.8": stage_1})'
    )
