"""The fence: nothing of a snapshot in flight may change before it was copied.

`tensor._version` does not see fused optimizers, `.data` or numpy writes, so it is one signal of
several.  The optimizer's pre-step hook waits for the copy; what slips past it is found by
comparing, at the fence, version, pointer and identity of every tensor and four canary elements of
each with those taken at the boundary, and the bytes of a rotating sample with the slot.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

CANARIES = 4
"""Elements of each tensor compared bit by bit; any update of a whole tensor changes them."""

SAMPLE_BYTES = 2 * 2**20
"""Bytes of the rotating sample compared with the slot at each fence (about 0.2 ms)."""


class StateProof:
    """What the lazy tensors looked like at the boundary."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._names = list(tensors)
        self._marks = [_mark(tensor) for tensor in tensors.values()]
        self._views = _canary_views(tensors)
        self._canaries = _take(self._views)

    def changed(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Names of tensors that moved, were replaced or changed since the boundary."""
        if list(tensors) != self._names:
            return sorted(set(tensors) ^ set(self._names)) or ["(order of the parameters)"]
        names = [
            name
            for name, mark, tensor in zip(self._names, self._marks, tensors.values(), strict=True)
            if _mark(tensor) != mark
        ]
        return names or self._canary_changes()

    def _canary_changes(self) -> list[str]:
        """Tensors whose canaries differ; one comparison for all of them as long as none does."""
        names = []
        groups = zip(self._views.values(), self._canaries, _take(self._views), strict=True)
        for views, before, after in groups:
            if torch.equal(before, after):
                continue
            start = 0
            for name, view in views:
                stop = start + view.nbytes
                if not torch.equal(before[start:stop], after[start:stop]):
                    names.append(name)
                start = stop
        return names


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()


_Views = dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]]


def _canary_views(tensors: dict[str, torch.Tensor]) -> _Views:
    """A few neighbouring elements from the middle of each tensor: contiguous views are 20 times
    faster to gather than strided ones, and an update of a whole tensor changes any of them."""
    views: _Views = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            count = tensor.numel()
            if not count:
                continue
            # `.data` keeps the memory alive (pointers are not reused) and not the tensor itself,
            # which a detached view would: torch refuses to swap a parameter that others hold.
            tensor = tensor.data
            if tensor.is_contiguous():
                flat = tensor.view(-1)
                middle = max(0, count // 2 - CANARIES // 2)
                view = flat.narrow(0, middle, min(CANARIES, count - middle))
            else:
                view = tensor[(0,) * tensor.dim()].view(1)
            views.setdefault((tensor.dtype, tensor.device), []).append((name, view))
    return views


def _take(views: _Views) -> list[torch.Tensor]:
    with torch.no_grad():
        return [
            torch.cat([view for _, view in group]).view(torch.uint8) for group in views.values()
        ]


class OptimizerHooks:
    """Calls `before` ahead of every optimizer step of `optimizers`, and `after` behind it."""

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._ids = {id(optimizer) for optimizer in optimizers}
        self._before = before
        self._after = after
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(self._pre),
            register_optimizer_step_post_hook(self._post),
        ]
        for optimizer in optimizers:
            hook = optimizer.register_load_state_dict_pre_hook
            self._handles.append(hook(lambda *_: self._before()))

    def guard_module(self, module: torch.nn.Module) -> None:
        """Also fences `load_state_dict` of a module, which writes parameters in place."""
        handle = module.register_load_state_dict_pre_hook(lambda *_: self._before())
        self._handles.append(handle)

    def remove(self) -> None:
        """Takes all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _pre(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._ids:
            self._before()

    def _post(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._ids:
            self._after()
