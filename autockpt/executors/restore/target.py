"""Where a load plan puts bytes: live tensors of this rank, and new memory for all others."""

from collections.abc import Callable

import torch

from autockpt.executors.linux.restore_allocator import RestoreAllocator
from autockpt.executors.restore.plan.averaging import mean_of
from autockpt.executors.restore.plan.load_plan import LoadPlan, PlannedTensor
from autockpt.executors.restore.plan.moves import Move, Want, bind
from autockpt.executors.sharding.local_memory import own_elements
from autockpt.executors.state.live_state import LiveState, local_part
from autockpt.values.errors import ConfigError


class RestoreTarget:
    """The memory of one plan.  Optimizer state is not live: it is replaced as a whole."""

    def __init__(self, state: LiveState, plan: LoadPlan, ready: Callable[[int], int]) -> None:
        """`ready(nbytes)`: address of new memory that was made ahead, or 0."""
        self._live = {**state.parameters(), **state.buffers()}
        self._plan = plan
        self._fresh: dict[str, torch.Tensor] = {}
        self._late: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        """(tensor, host memory whose mean it is at the end): devices, odd strides, copies."""
        new = [tensor for tensor in plan.tensors if not tensor.in_place]
        self._memory = RestoreAllocator([one.nbytes for one in new for _ in one.reads], ready)

    def moves(self) -> list[Move]:
        """Every read of the plan, with the address that it goes to."""
        return [
            move
            for tensor in self._plan.tensors
            for want, reads in zip(self._wants(tensor), tensor.reads, strict=True)
            for move in bind(want, reads)
        ]

    def _wants(self, tensor: PlannedTensor) -> list[Want]:
        """Where the bytes of a tensor go first; `finish` does the rest."""
        live: torch.Tensor | None = None
        if tensor.live:
            live = local_part(self._live[tensor.name], tensor.holding).detach()
            if tensor.in_place:
                return [Want(name=tensor.name, holding=tensor.holding, memory=live)]
        names = tensor.copies or (tensor.name,)
        own = [self._new(tensor) for _ in names]
        if live is None:
            self._fresh[tensor.name] = own[0]
        if live is not None or tensor.copies:
            self._late.append((own[0] if live is None else live, own))
        return [
            Want(name=name, holding=tensor.holding, memory=own_elements(memory, tensor.holding))
            for name, memory in zip(names, own, strict=True)
        ]

    def _new(self, tensor: PlannedTensor) -> torch.Tensor:
        memory = self._memory.tensor(tensor.shape, tensor.dtype)
        if memory.numel() != tensor.holding.count:
            memory.zero_()  # what pads it is in no checkpoint
        return memory

    def finish(self) -> dict[str, torch.Tensor]:
        """Everything was put: fills devices; the tensors without a live one, by all their names."""
        for tensor, copies in self._late:
            _fill(tensor, mean_of(copies))
        fresh = self._fresh
        for planned in self._plan.tensors:
            if planned.strides is not None:
                made = fresh[planned.name]
                strided = made.as_strided(made.shape, planned.strides)
                fresh[planned.name] = strided.copy_(made.clone())
        for alias, original in self._plan.aliases.items():
            if alias in fresh and original in fresh:
                fresh[alias] = fresh[original]  # they shared memory, and do so again
        return fresh


def _fill(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Copies; the repeated elements of an expanded tensor once.

    Raises ConfigError when the saved elements do not repeat.
    """
    once, rest = tensor, saved
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            once, rest = once.narrow(dim, 0, 1), rest.narrow(dim, 0, 1)
    if once is not tensor:
        again = rest.expand(saved.shape).contiguous()
        if not torch.equal(again.view(-1).view(torch.uint8), saved.view(-1).view(torch.uint8)):
            raise ConfigError(
                f"state: a tensor of {tuple(saved.shape)} is expanded now and was not in the "
                "checkpoint; build it with memory of its own (clone())"
            )
    once.copy_(rest)
