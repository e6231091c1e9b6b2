"""Names that every kind of wrapper and every number of pipeline stages agrees on.

A parameter is called what it is called in the bare model.  Wrappers put their own words into the
name; a hand-made pipeline stage counts its layers from 0 again.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from autockpt.values.errors import ConfigError

_WRAPPING = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""torch.compile, FSDP1, activation checkpointing (checkpoint_wrapper): anywhere in a name."""
_TAKEN_OFF = _WRAPPING | {"module"}


def plain_fqn(name: str) -> str:
    """A parameter's name in the bare model.

    `module.` is taken off at the front only (DDP, DeepSpeed engine): inside, it may be the model's
    own word.
    """
    words = _words(name)
    return ".".join(words[_leading(words) :])


def _words(name: str) -> list[str]:
    return [word for word in name.split(".") if word not in _WRAPPING]


def _leading(words: list[str]) -> int:
    """How many `module` stand in front of a name."""
    return next((i for i, word in enumerate(words[:-1]) if word != "module"), len(words) - 1)


class ModelNames:
    """Names of one model's parameters, buffers and extra states: mostly `plain_fqn`.

    Two things with one such name (`self.module.head` and `self.head`) keep every `module` that not
    all names of the model begin with.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._longer: dict[str, str] = {}
        """By path in the model."""
        if all(_TAKEN_OFF.isdisjoint(module._modules) for module in model.modules()):
            return  # a third of the walk else, for every model
        claims: dict[str, dict[str, int]] = {}
        for path, plain, thing in _claimed(model):
            claims.setdefault(plain, {})[path] = thing
        twice = [path for own in claims.values() if len({*own.values()}) > 1 for path in own]
        if twice:
            common = min(_leading(_words(path)) for own in claims.values() for path in own)
            self._longer = {path: ".".join(_words(path)[common:]) for path in twice}

    def of(self, path: str) -> str:
        """The name of the parameter or buffer at a path in the model."""
        return self._longer.get(path) or plain_fqn(path)

    def of_state(self, path: str) -> str:
        """The name of the extra state of the module at a path."""
        return self._longer.get(f"{path}.{_STATE}") or f"{plain_fqn(path)}.{_STATE}"

    @property
    def passing(self) -> set[str]:
        """Names of the buffers that do not persist, None or not."""
        return {
            self.of(f"{path}.{name}".lstrip("."))
            for path, module in self._model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }


_STATE = "_extra_state"


def has_extra_state(module: torch.nn.Module) -> bool:
    """It has a state of its own, beside tensors."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _claimed(model: torch.nn.Module) -> Iterator[tuple[str, str, int]]:
    """(path, plain name, identity) of all that gets a name; of a buffer that is None, its
    module's: a forward may fill it."""
    for path, parameter in model.named_parameters(remove_duplicate=False):
        yield path, plain_fqn(path), id(parameter)
    for path, module in model.named_modules(remove_duplicate=False):
        if has_extra_state(module):
            yield f"{path}.{_STATE}", f"{plain_fqn(path)}.{_STATE}", id(module)
        for name, buffer in module._buffers.items():
            below = f"{path}.{name}" if path else name
            yield below, plain_fqn(below), id(module if buffer is None else buffer)


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
