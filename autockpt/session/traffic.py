"""Tells the keeper when the training's own network traffic runs, where the plan wants it.

Collectives that Python calls are seen as they are.  DDP's collectives run in C++, and only the
script may register a communication hook.  So DDP's traffic counts from the end of a forward with
gradients to reduce until the optimizer's step.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from autockpt.executors.keeper.client.traffic_marks import MarkWriter
from autockpt.executors.state import own_hooks
from autockpt.profiles.probes.windows.collectives import CollectiveHooks
from autockpt.values.plan import CheckpointPlan
from autockpt.values.redundancy import copy_iterations


class TrafficMarks:
    """The marks of one rank; used on the training thread."""

    def __init__(self, board: memoryview, models: Iterable[torch.nn.Module]) -> None:
        self._marks = MarkWriter(board)
        self._models = list(models)
        self._collectives = CollectiveHooks(None, self._marks)
        self._forwards: list[Any] = []
        self._on = False

    def follow(self, plan: CheckpointPlan) -> str:
        """Begins or ends to mark, as the plan wants; why it does not although that does, or ""."""
        wanted = plan.redundancy.schedule == "windows" and plan.redundancy.scheme != "none"
        interval = plan.tier("memory").interval_steps
        if not (wanted and interval):
            self.close()
            return ""
        if any(p.device.type != "cpu" for model in self._models for p in model.parameters()):
            self.close()
            return "when the collectives of a device end is not known: copies leave at the rate"
        if not self._on:
            self._open()
        self._marks.spread(copy_iterations(interval))
        return ""

    def step_began(self) -> None:
        """An optimizer's step begins."""
        if self._on:
            self._marks.step_began()

    def boundary(self) -> None:
        """It ended."""
        if self._on:
            self._marks.boundary()

    def close(self) -> None:
        """Marks nothing more; the keeper knows."""
        if self._on:
            self._marks.spread(0)
            self.disown()

    def disown(self) -> None:
        """Marks nothing more; the marks stay as they are."""
        if self._on:
            self._collectives.detach()
            while self._forwards:
                self._forwards.pop().remove()
            self._on = False

    def _open(self) -> None:
        self._on = True
        if torch.distributed.is_available():
            self._collectives.attach()
        self._forwards = [own_hooks.after_call(model, self._forwarded) for model in self._models]

    def _forwarded(self, *_: Any) -> None:
        """A forward ended; within one of DDP's, gradients are reduced from now on."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if getattr(ddp, "require_backward_grad_sync", False):
            self._marks.began("backward")
