"""When the network of a data-parallel job is in use: collectives from their call to their end.

The calls of Python on `torch.distributed` (FSDP2's all-gathers and reduce-scatters, a script's own)
are wrapped.  DDP's all-reduces run in C++ and are seen through a communication hook.  It cannot be
removed again, so it is for processes that end with the profile.  On a host the end is that of the
operation.  With NCCL it is the moment when the device began to wait: a future of NCCL is done once
enqueued.  Windows of a GPU's network are only as good as that.
"""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autockpt.profiles.probes.windows.pipeline_hooks import ChunkListener
from autockpt.profiles.samples import TraceSample

_Bucket: Any = vars(dist)["GradBucket"]  # DDP checks the annotation of a hook
NAMES = (
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_gather",
    "reduce_scatter", "all_to_all_single", "all_to_all", "reduce",
)  # fmt: skip


class CollectiveRecorder:
    """Spans of collectives between two optimizer steps; ends come from threads of the back end."""

    def __init__(self) -> None:
        self.samples: list[TraceSample] = []
        self._lock = threading.Lock()
        self._began_s: float | None = None
        self._step_s: float | None = None
        self._spans: list[tuple[str, float, float]] = []
        self._probe_s = 0.0

    def span(self, what: str, began_s: float, ended_s: float) -> None:
        """One collective ended."""
        with self._lock:
            self._spans.append((what, began_s, ended_s))

    def took(self, seconds: float) -> None:
        """Count the cost of the wrappers themselves to the training thread."""
        self._probe_s += seconds

    def step_began(self) -> None:
        """The optimizer's step begins."""
        if self._step_s is None:
            self._step_s = time.perf_counter()

    def boundary(self) -> None:
        """It ended, and an iteration with it."""
        now_s = time.perf_counter()
        with self._lock:
            spans, self._spans = sorted(self._spans, key=lambda span: span[1]), []
        began_s, step_s = self._began_s, self._step_s
        if began_s is not None:
            inside = [(what, a - began_s, b - began_s) for what, a, b in spans if a >= began_s]
            self.samples.append(
                TraceSample(
                    marks=tuple(what for what, _, _ in inside),
                    spans=tuple((a, b) for _, a, b in inside),
                    step_s=(now_s if step_s is None else step_s) - began_s,
                    iteration_s=now_s - began_s, probe_s=self._probe_s,
                )
            )  # fmt: skip
        self._began_s, self._step_s, self._probe_s = now_s, None, 0.0


class CollectiveHooks:
    """Tells a recorder of collectives while attached, and a listener as they happen."""

    def __init__(
        self, recorder: CollectiveRecorder | None, listener: ChunkListener | None = None
    ) -> None:
        """`listener` hears ends on threads of the back end."""
        self._recorder, self._listener = recorder, listener
        self._originals: dict[str, Callable[..., Any]] = {}

    def attach(self) -> None:
        """Wraps the functions of `torch.distributed`; a compiled graph has the original ones."""
        for name in NAMES:
            self._wrap(name)

    def detach(self) -> None:
        """Puts them back; twice is fine."""
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals = {}

    def watch_ddp(self, module: torch.nn.Module) -> bool:
        """Sees the buckets of DDP; False where the script has a communication hook of its own."""
        state = None
        try:
            module.register_comm_hook(state, self._bucket)  # type: ignore[operator]
        except (RuntimeError, ValueError, TypeError):
            return False
        return True

    def _wrap(self, name: str) -> None:
        original = self._originals[name] = getattr(dist, name)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            began_s = self._began(name)
            work = original(*args, **kwargs)
            called_s = time.perf_counter()
            try:
                work.get_future().add_done_callback(lambda _: self._ended(name, began_s))
            except (AttributeError, RuntimeError):  # it was waited for, or gives no time
                self._ended(name, began_s)
            if self._recorder is not None:
                self._recorder.took(time.perf_counter() - called_s)
            return work

        setattr(dist, name, collective)

    def _began(self, name: str) -> float:
        if self._listener is not None:
            self._listener.began(name)
        return time.perf_counter()

    def _ended(self, name: str, began_s: float) -> None:
        if not self._originals:
            return  # detached, and DDP keeps its hook
        if self._recorder is not None:
            self._recorder.span(name, began_s, time.perf_counter())
        if self._listener is not None:
            self._listener.ended(name)

    def _bucket(self, state: object, bucket: _Bucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's own mean of a bucket, with its times."""
        began_s = self._began("all_reduce")
        tensor = bucket.buffer().div_(dist.get_world_size())
        reduce: Any = self._originals.get("all_reduce", dist.all_reduce)
        future = reduce(tensor, async_op=True).get_future()

        def done(finished: Any) -> Any:
            self._ended("all_reduce", began_s)
            return finished.value()[0]

        reduced: torch.futures.Future[torch.Tensor] = future.then(done)
        return reduced
