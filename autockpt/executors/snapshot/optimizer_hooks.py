"""The fence: nothing of a snapshot in flight may change before it was copied.

`tensor._version` does not see fused optimizers, `.data` or numpy writes, so it is one signal of
several.  The optimizer's pre-step hook waits for the copy; comparisons at the fence find changes
that slip past it.  They compare version, pointer and identity of every tensor, and four canary
elements of each, with the boundary's.  They also compare the bytes of a rotating sample with the
slot.
"""

import ctypes
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, cast

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autockpt.executors.sharding.optimizers import steps_as
from autockpt.executors.snapshot.device import DeviceRead, device_of
from autockpt.executors.state import own_hooks
from autockpt.executors.state.tensor_index import addresses

CANARIES = 4
"""Elements of each tensor compared bit by bit; any update of a whole tensor changes them."""


class Reader(Protocol):
    """How values of a device come to the host without a wait (device.DeviceCopier)."""

    def read(self, values: torch.Tensor) -> DeviceRead:
        """Issues the transfer."""


@dataclass(slots=True)
class CanaryGroup:
    """Canaries of one dtype and device."""

    names: list[str]
    views: list[torch.Tensor]
    memory: list[memoryview]
    """Memory of the views, where this process can read it."""

    def take(self, *, moved: bool = False) -> bytes:
        """Their bytes as of now; waits for a device.

        `moved`: a tensor left its place, and its memory may be elsewhere by now.
        """
        if self.memory and not moved:
            return b"".join(self.memory)  # 20 times faster than a call of torch
        return host_bytes(self.gather())

    def gather(self) -> torch.Tensor:
        """Their bytes where they are."""
        with torch.no_grad():
            return torch.cat(self.views).view(torch.uint8)

    def differing(self, before: bytes, after: bytes) -> list[str]:
        """Names whose canaries differ; one comparison for all of them as long as none does."""
        if before == after:
            return []
        names = []
        start = 0
        for name, view in zip(self.names, self.views, strict=True):
            stop = start + view.nbytes
            if before[start:stop] != after[start:stop]:
                names.append(name)
            start = stop
        return names


def host_bytes(values: torch.Tensor) -> bytes:
    """The bytes of a tensor of bytes; waits for a device."""
    return values.cpu().numpy().tobytes()


class StateProof:
    """Evidence of some tensors at the boundary.

    `groups` are their canaries and `places` their addresses, where those are known already.  With
    a `reader` the canaries of a device are compared by `late_changes`, once the device has come so
    far.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        *,
        groups: list[CanaryGroup] | None = None,
        places: list[int] | None = None,
        reader: Reader | None = None,
    ) -> None:
        self._tensors = tensors
        self._versions = _versions(tensors)
        self._places = addresses(tensors.values()) if places is None else places
        groups = canary_groups(tensors) if groups is None else groups
        self._reader = reader
        late = [reader is not None and device_of(group.views[0]) is not None for group in groups]
        self._groups = [g for g, on_device in zip(groups, late, strict=True) if not on_device]
        self._device_groups = [g for g, on_device in zip(groups, late, strict=True) if on_device]
        self._before = [group.take() for group in self._groups]
        self._reads_before = self._read()
        self._reads_after: list[DeviceRead] = []

    def changed(self, tensors: dict[str, torch.Tensor] | None = None) -> list[str]:
        """Names of tensors that moved, were replaced or changed since the boundary.

        `tensors`: the tensors that stand there now, when they may be others.
        """
        differing, moved = self.compare(tensors)
        return list(dict.fromkeys([*differing, *moved]))

    def compare(
        self, tensors: dict[str, torch.Tensor] | None = None
    ) -> tuple[list[str], list[str]]:
        """(replaced or changed, only moved to another address) since the boundary."""
        names = list(self._tensors)
        self._reads_after = self._read()
        if tensors is None:
            tensors = self._tensors
        elif list(tensors) != names:
            return sorted(set(tensors) ^ set(names)) or ["(order of the parameters)"], []
        places = addresses(tensors.values())
        moved = _where(names, self._places, places)
        gone = {name for name in moved if not places[names.index(name)]}
        differing = _where(names, self._versions, _versions(tensors))
        # Both: of what a fused step changed only the step counts have another version.
        for group, before in zip(self._groups, self._before, strict=True):
            if gone.isdisjoint(group.names):
                differing += group.differing(before, group.take(moved=bool(moved)))
        return differing, moved

    def late_changes(self) -> list[str]:
        """As `changed`, for canaries of a device; waits for it, so never on the training thread."""
        reads = zip(self._device_groups, self._reads_before, self._reads_after, strict=True)
        return [
            name
            for group, before, after in reads
            for name in group.differing(host_bytes(before.wait()), host_bytes(after.wait()))
        ]

    def _read(self) -> list[DeviceRead]:
        if self._reader is None:
            return []
        return [self._reader.read(group.gather()) for group in self._device_groups]


def _versions(tensors: dict[str, torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors.values()]


def _where(names: list[str], before: list[int], now: list[int]) -> list[str]:
    """Names whose mark is another one."""
    if before == now:
        return []
    return [name for name, old, new in zip(names, before, now, strict=True) if old != new]


def canary_groups(tensors: dict[str, torch.Tensor]) -> list[CanaryGroup]:
    """Return a few neighbouring elements from the middle of each tensor.

    Contiguous views are 20 times faster to gather than strided ones, and an update of a whole
    tensor changes any of them.
    """
    groups: dict[tuple[object, ...], CanaryGroup] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            count, place = tensor.numel(), (tensor.device, device_of(tensor))
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
            group = groups.setdefault((tensor.dtype, *place), CanaryGroup([], [], []))
            group.names.append(name)
            group.views.append(view)
            if tensor.device.type == "cpu" and place[1] is None:
                block = (ctypes.c_char * view.nbytes).from_address(view.data_ptr())
                group.memory.append(memoryview(block))
    return list(groups.values())


class OptimizerHooks:
    """Calls `before(optimizer)` ahead of every step of `optimizers`, and `after(optimizer)` behind.

    `before(None)`: anything may change now (`load_state_dict`).
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        before: Callable[[torch.optim.Optimizer | None], None],
        after: Callable[[torch.optim.Optimizer], None],
        inner: Mapping[torch.optim.Optimizer, torch.optim.Optimizer] | None = None,
        other: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        """`inner`: by an optimizer inside another one that of `optimizers` whose step it is.

        `other` gets all others ahead of their steps, unless these are part of such a step.
        """
        inner = inner or {}
        self._known = {id(steps_as(optimizer)): optimizer for optimizer in optimizers}
        self._known |= {id(steps_as(one)): outer for one, outer in inner.items()}
        self._stepping: dict[int, list[int]] = {}
        """By id of one of `optimizers` those within it that step now, the outermost first."""
        self._before = before
        self._after = after
        self._other = other
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(self._pre),
            register_optimizer_step_post_hook(self._post),
        ]
        for optimizer in (*optimizers, *inner):
            known = steps_as(optimizer)
            if hasattr(known, "_optimizer_load_state_dict_pre_hooks"):  # its constructor was called
                self._guard(known)

    def guard_module(self, module: torch.nn.Module) -> None:
        """Also fences `load_state_dict` of a module, which writes parameters in place."""
        self._guard(module)

    def remove(self) -> None:
        """Takes all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _guard(self, owner: torch.nn.Module | torch.optim.Optimizer) -> None:
        self._handles.append(own_hooks.before_load(owner, lambda *_: self._before(None)))

    def _pre(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        known = self._known.get(id(optimizer))
        if known is None:
            if self._other is not None and not any(self._stepping.values()):
                self._other(optimizer)
            return None
        within = self._stepping.setdefault(id(known), [])
        if id(optimizer) in within and not _is_again(optimizer):
            del within[within.index(id(optimizer)) :]  # its last step ended with an exception
        within.append(id(optimizer))
        by_name = "closure" in kwargs
        closure = kwargs["closure"] if by_name else next(iter(args[1:]), None)
        if not callable(closure) or not type(optimizer).__module__.startswith("torch.optim"):
            self._before(known)
            return None

        def fenced() -> Any:
            # torch's optimizers change nothing before they have called it, and it holds forward
            # and backward, under which a snapshot may still be copied.
            result = closure()
            with torch.no_grad():
                self._before(known)
            return result

        if by_name:
            return args, {**kwargs, "closure": fenced}
        return (args[0], fenced, *args[2:]), kwargs

    def _post(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        known = self._known.get(id(optimizer))
        if known is None:
            return
        within = self._stepping.get(id(known), [])
        if id(optimizer) in within:
            last = len(within) - within[::-1].index(id(optimizer)) - 1
            del within[last:]
        if not within:
            self._after(known)


def _is_again(optimizer: torch.optim.Optimizer) -> bool:
    """A step of it is within another one of it: torch tells of `super().step()` as well."""
    count, frame = 0, cast("FrameType | None", sys._getframe(2))
    while frame is not None and count < 2:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _TELLING:
            count += frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return count == 2


_TELLING = inspect.getfile(torch.optim.Optimizer)
"""Where torch's wrapper of every `step` is, which calls the hooks."""
