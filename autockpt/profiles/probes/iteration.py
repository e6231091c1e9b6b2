"""Iterations and their phases, from hooks that torch offers to everybody.

An iteration ends with the step of the last optimizer (a GAN has two) and holds any number of
forwards and backwards.  They are found by hooks on all optimizers and, until the roots are known,
on all modules.  Then only the roots keep hooks, because a global module hook costs microseconds at
each of hundreds of sub-modules.  backward() and the DataLoader have no hook, their entry points are
wrapped while a timer is attached.  On a GPU the marks are events on the current stream, read one
iteration late to avoid waiting for the device.  Cost: about 10 us per iteration and micro-batch.

    boundary | data_wait | forward | backward | (more micro-batches) | optimizer | boundary
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader
from torch.utils.hooks import RemovableHandle

from autockpt.profiles.samples import PHASES, IterationSample

_WRAPPERS = ("_orig_mod", "module")


class Ticker(Protocol):
    """A source of marks on one time line."""

    late: bool
    """True when a mark may be read only after the device has passed it."""

    def mark(self) -> Any:
        """Now."""

    def between(self, began: Any, ended: Any) -> float:
        """Seconds from one mark to another."""


class HostTicker:
    """Marks are readings of the performance counter."""

    late = False

    def mark(self) -> float:
        """Now, seconds."""
        return time.perf_counter()

    def between(self, began: float, ended: float) -> float:
        """Their difference."""
        return ended - began


class CudaTicker:
    """Marks are events on the current stream: device time, no waiting when they are taken."""

    late = True

    def mark(self) -> torch.cuda.Event:
        """An event recorded now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        """Seconds between two events; waits if the device has not passed the later one."""
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


class RootFinder:
    """Modules that the script itself calls (depth 0) while gradients are on."""

    def __init__(self) -> None:
        self.roots: list[torch.nn.Module] = []
        """In order of their first call, as called: wrappers of DDP and torch.compile included."""
        self._inside: torch.nn.Module | None = None
        self._paused = False
        self._thread = threading.get_ident()
        self._handles = [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]

    def pause(self, paused: bool) -> None:
        """Activation checkpointing calls sub-modules inside backward: those are no roots."""
        self._paused = paused

    def close(self) -> None:
        """Removes the hooks; twice is fine."""
        for handle in self._handles:
            handle.remove()

    def _entered(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the inside of a compiled module is traced with its hooks: no place for ours
        if self._inside is not None or self._paused or threading.get_ident() != self._thread:
            return
        if torch.is_grad_enabled():
            self._inside = module
            if not any(module is root for root in self.roots):
                self.roots.append(module)

    def _left(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling() and self._inside is module:
            self._inside = None


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside DDP and torch.compile wrappers."""
    kind = type(module).__name__
    if kind in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        for name in _WRAPPERS:
            inner = module._modules.get(name)
            if inner is not None:
                return unwrap(inner)
    return module


@dataclass(slots=True)
class _Span:
    """One stretch of a phase."""

    phase: str
    began: Any
    ended: Any
    nested: bool
    """Inside an optimizer step: optimizers that call a closure."""


@dataclass(slots=True)
class _Marks:
    """An iteration before its marks are read."""

    label: Any
    began: Any
    ended: Any
    spans: list[_Span]
    excluded: list[tuple[Any, Any]]
    """Our own waits at the fence."""


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook was called by a step inside a step of the same optimizer.

    torch wraps the step of a subclass and that of its base class, so `super().step()` runs the
    hooks twice.  The frames tell; a counter would not survive a step that raises.
    """
    step = sys._getframe(2)  # the caller of the hook: torch's wrapper around step
    frame = step.f_back
    while frame is not None:
        if frame.f_code is step.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


AroundCall = Callable[
    [torch.nn.Module, Callable[..., None], Callable[..., None]], Iterable[RemovableHandle]
]
"""Registers what runs before and behind every call of a module, also one that raised."""


def _around_call(
    module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> list[RemovableHandle]:
    return [
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    ]


class PhaseTimer:
    """Times every iteration while attached.

    `on_fence(optimizer)` runs before each optimizer step, `on_boundary()` after the step that ends
    an iteration.  Their time is in no iteration and no phase.  `around_call` registers hooks of a
    module.  `label` is stored with each sample.  All of it runs on the training thread.
    """

    def __init__(
        self,
        *,
        ticker: Ticker | None = None,
        on_fence: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
        on_boundary: Callable[[], None] = lambda: None,
        around_call: AroundCall = _around_call,
    ) -> None:
        self._around_call = around_call
        self.ticker = ticker or HostTicker()
        self.label: Any = None
        self.samples: list[tuple[Any, IterationSample]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        """In order of their first step; the last one's step ends an iteration."""
        self.finder: RootFinder | None = RootFinder()
        self.steps = 0
        """Iterations ended, counted or not."""
        self._on_fence, self._on_boundary = on_fence, on_boundary
        self._thread = threading.get_ident()
        self._spans: list[_Span] = []
        self._began: Any = None
        self._late: _Marks | None = None
        self._open: dict[str, Any] = {}
        self._depth = {"forward": 0, "backward": 0, "data_wait": 0}
        self._excluded: list[tuple[Any, Any]] = []
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(self._step_began),
            register_optimizer_step_post_hook(self._step_ended),
        ]
        self._wrap_entry_points()

    # -- what the training calls ------------------------------------------------------------

    def _step_began(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _is_nested(optimizer):
            return
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        before = self.ticker.mark()
        self._on_fence(optimizer)
        self._open["optimizer"] = now = self.ticker.mark()
        self._excluded.append((before, now))

    def _step_ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _is_nested(optimizer):
            return
        began = self._open.pop("optimizer", None)
        now = self.ticker.mark()
        if began is not None:
            self._spans.append(_Span("optimizer", began, now, False))
        if optimizer is not self.optimizers[-1]:
            return
        self.steps += 1
        if self._began is not None:
            self._close_iteration(now)
        self._spans, self._excluded, self._began = [], [], None
        self._on_boundary()
        self._began = self.ticker.mark()

    def _enter(self, phase: str) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return  # a prefetching thread: it costs the iteration nothing
        self._depth[phase] += 1
        if self._depth[phase] == 1:
            self._open[phase] = self.ticker.mark()

    def _leave(self, phase: str) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        if not self._depth[phase]:
            return
        self._depth[phase] -= 1
        if self._depth[phase] == 0:
            nested = "optimizer" in self._open
            self._spans.append(_Span(phase, self._open.pop(phase), self.ticker.mark(), nested))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks the fetching of a batch; a DataLoader used inside is not counted twice."""
        self._enter("data_wait")
        try:
            yield
        finally:
            self._leave("data_wait")

    # -- from marks to samples --------------------------------------------------------------

    def _close_iteration(self, ended: Any) -> None:
        marks = _Marks(self.label, self._began, ended, self._spans, self._excluded)
        if not self.ticker.late:
            self._resolve(marks)
            return
        self.flush()
        self._late = marks

    def flush(self) -> None:
        """Reads the marks of the last iteration; waits for the device if it is not there yet."""
        if self._late is not None:
            marks, self._late = self._late, None
            self._resolve(marks)

    def _resolve(self, marks: _Marks) -> None:
        between = self.ticker.between
        total = between(marks.began, marks.ended) - sum(between(*pair) for pair in marks.excluded)
        parts = dict.fromkeys(PHASES, 0.0)
        for span in marks.spans:
            length = between(span.began, span.ended)
            parts[span.phase] += length
            if span.nested:
                parts["optimizer"] -= length
        if not any(span.phase == "data_wait" for span in marks.spans):
            # No loader in sight: the time before the first forward counts as its wait.
            first = next((span for span in marks.spans if span.phase == "forward"), None)
            if first is not None and not first.nested:
                parts["data_wait"] = max(0.0, between(marks.began, first.began))
        known = sum(parts.values())
        parts["other"] = max(0.0, total - known)
        sample = IterationSample(iteration_s=max(total, known), phases_s=parts)
        self.samples.append((marks.label, sample))

    # -- attaching --------------------------------------------------------------------------

    def settle_roots(self) -> list[torch.nn.Module]:
        """Ends the search: removes the global module hooks, hooks the roots alone, returns them."""
        if self.finder is None:
            return []
        roots = self.finder.roots
        self.finder.close()
        self.finder = None
        for root in roots:
            self._handles += self._around_call(
                root,
                lambda module, args: self._enter("forward"),
                lambda module, args, result: self._leave("forward"),
            )
        return roots

    def _wrap_entry_points(self) -> None:
        self._backward = torch.autograd.backward
        loader: Any = dataloader._BaseDataLoaderIter
        self._next = loader.__next__
        backward, following = self._backward, self._next

        def timed_backward(*args: Any, **kwargs: Any) -> None:
            self._enter("backward")
            if self.finder:
                self.finder.pause(True)
            try:
                backward(*args, **kwargs)
            finally:
                if self.finder:
                    self.finder.pause(False)
                self._leave("backward")

        def timed_next(iterator: Any) -> Any:
            with self.waiting():
                return following(iterator)

        torch.autograd.backward = timed_backward
        loader.__next__ = timed_next

    def close(self) -> None:
        """Takes every hook away and puts the entry points back; not inside an optimizer hook."""
        if self.finder is not None:
            self.finder.close()
            self.finder = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        torch.autograd.backward = self._backward
        loader: Any = dataloader._BaseDataLoaderIter
        loader.__next__ = self._next
