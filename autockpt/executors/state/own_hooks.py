"""Hooks of ours on the script's modules and optimizers, which do not leave this process.

torch keeps hooks in dictionaries of the object, and these are pickled, copied and compiled with it.
Our hooks are of one session.  `torch.save(model)` and `copy.deepcopy(model)` leave them out, so
that the copy is as if autockpt had not attached.  `torch.jit.script` does not see them.  Hooks of
the script are treated as ever.
"""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class _Hooks(OrderedDict[int, Any]):
    """The hooks of an object; ours are called and belong to no copy."""

    def ours(self) -> set[int]:
        """Keys of our hooks."""
        found: set[int] = self.__dict__.setdefault("_ours", set())
        return found

    def others(self) -> list[tuple[int, Any]]:
        """Hooks of the script."""
        ours = self.ours()
        return [(key, hook) for key, hook in self.items() if key not in ours]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Give copies and files a dictionary as torch makes it."""
        return OrderedDict, (), None, None, iter(self.others())


class _HooksOfCalls(_Hooks):
    """A call takes `items()`; a compiler of modules takes `values()`, and must not see ours."""

    def values(self) -> Any:
        """Hooks of the script."""
        return [hook for _, hook in self.others()]


def before_call(module: torch.nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Registers a forward pre-hook that runs ahead of all others."""
    hooks = _take(module, "_forward_pre_hooks", _HooksOfCalls)
    return _marked(module.register_forward_pre_hook(hook, prepend=True), hooks)


def after_call(
    module: torch.nn.Module, hook: Callable[..., Any], *, always: bool = False
) -> RemovableHandle:
    """Registers a forward hook; `always`: also after a call that raised."""
    hooks = _take(module, "_forward_hooks", _HooksOfCalls)
    always_called = _take(module, "_forward_hooks_always_called", _Hooks)
    return _marked(module.register_forward_hook(hook, always_call=always), hooks, always_called)


def around_call(
    module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> list[RemovableHandle]:
    """Registers both; `after` also runs after a call that raised."""
    return [before_call(module, before), after_call(module, after, always=True)]


def before_load(
    owner: torch.nn.Module | torch.optim.Optimizer, hook: Callable[..., Any]
) -> RemovableHandle:
    """Registers a hook ahead of `load_state_dict`."""
    kind = "_optimizer" if isinstance(owner, torch.optim.Optimizer) else ""
    hooks = _take(owner, f"{kind}_load_state_dict_pre_hooks", _Hooks)
    return _marked(owner.register_load_state_dict_pre_hook(hook), hooks)


def _marked(handle: RemovableHandle, *dictionaries: _Hooks) -> RemovableHandle:
    for hooks in dictionaries:
        hooks.ours().add(handle.id)
    return handle


def _take(owner: Any, name: str, kind: type[_Hooks]) -> _Hooks:
    """Give the object a dictionary of hooks that marks ours."""
    former = owner.__dict__.get(name, {})
    if isinstance(former, _Hooks):
        return former
    taken = kind(former)
    object.__setattr__(owner, name, taken)
    if former:
        _hand_over(former, taken)
    return taken


def _hand_over(former: Any, taken: _Hooks) -> None:
    """Handles by which the script removes its hooks refer to the dictionary that was there."""
    here = weakref.ref(taken)
    for handle in gc.get_objects():
        if type(handle) is not RemovableHandle:
            continue
        if handle.hooks_dict_ref() is former:
            handle.hooks_dict_ref = here
        others = handle.extra_dict_ref
        if any(other() is former for other in others):
            handle.extra_dict_ref = tuple(here if o() is former else o for o in others)
