"""The quiet iterations of a profile, once more: where each rank's device and network idle.

Every rank measures its own and all of them meet in rank 0's profile.  A failure here costs the
windows and a sentence, never the profile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autockpt.executors.snapshot.device import DeviceCopier
from autockpt.profiles import windows
from autockpt.profiles.assemble import Measurements
from autockpt.profiles.estimators import maybe
from autockpt.profiles.probes.iteration import CudaTicker
from autockpt.profiles.probes.windows.collectives import CollectiveHooks, CollectiveRecorder
from autockpt.profiles.probes.windows.iteration_trace import TraceRecorder
from autockpt.profiles.probes.windows.pipeline_hooks import StageHooks
from autockpt.profiles.probes.windows.pipeline_orders import schedule_name
from autockpt.profiling.facts.ranks import Ranks
from autockpt.profiling.measure.window_hooks import StageGate
from autockpt.values.errors import AutockptError
from autockpt.values.profile import Bubble, IterationTrace
from autockpt.values.record import from_json, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWindows:
    """The windows that one rank sends to the writing rank."""

    traces: tuple[IterationTrace, ...]
    bubbles: tuple[Bubble, ...]


class WindowProbe:
    """Listens to pipeline stages and collectives while attached."""

    def __init__(self) -> None:
        self._chunks, self._network = TraceRecorder(), CollectiveRecorder()
        self._stages, self._collectives = StageHooks(self._chunks), CollectiveHooks(self._network)
        self._attached = False
        self._blind = False
        self._own_windows = RankWindows(traces=(), bubbles=())
        self.stages: StageGate | None = None
        """Gate that holds copies back while their cost is measured; None: no copy is held back."""

    def attach(self, roots: Sequence[torch.nn.Module], *, late: bool) -> None:
        """Begins to listen; `late`: to a device, whose marks are read an iteration later."""
        if late:
            self._chunks.ticker = CudaTicker()
        self._stages.attach()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._collectives.attach()
            for root in roots:
                if type(root).__name__ == "DistributedDataParallel":
                    self._blind |= not self._collectives.watch_ddp(root)
        self._attached = True

    def detach(self) -> None:
        """Listens no more; twice is fine."""
        self._stages.detach()
        self._collectives.detach()
        self._attached = False
        if self.stages is not None:
            self.stages.close()
            self.stages = None

    def hold_back(self, rank: int, device: DeviceCopier | None) -> StageGate:
        """A gate that knows the windows of this rank, until `detach`."""
        self.stages = StageGate(device=device)
        self.stages.hand_in(rank, self._own_windows.traces, self._own_windows.bubbles)
        return self.stages

    @property
    def idles(self) -> bool:
        """This rank has windows between the chunks of a pipeline; known from `bring_home` on."""
        return any(bubble.after >= 0 for bubble in self._own_windows.bubbles)

    def step_began(self) -> None:
        """The optimizer's step begins."""
        if self.stages is not None:
            self.stages.step_began()
        if self._attached:
            self._chunks.step_began()
            self._network.step_began()

    def boundary(self) -> None:
        """It ended."""
        if self.stages is not None:
            self.stages.boundary()
        if self._attached:
            self._chunks.boundary()
            self._network.boundary()

    def bring_home(
        self, measured: Measurements, ranks: Ranks, data_wait_s: Sequence[float]
    ) -> None:
        """The windows of all ranks into `measured`; every rank must call it."""
        try:
            self._own_windows = self._own(ranks.rank, data_wait_s)
        except AutockptError as error:
            measured.warnings.append(f"windows: not measured: {error}")
        if self._blind:
            measured.warnings.append(
                "windows of the network: not measured, DDP has a communication hook already"
            )
        for text in ranks.gathered(to_json(self._own_windows)):
            found = from_json(RankWindows, text)
            measured.traces += found.traces
            measured.bubbles += found.bubbles

    def _own(self, rank: int, data_wait_s: Sequence[float]) -> RankWindows:
        self._chunks.flush()
        traces: list[IterationTrace] = []
        bubbles: list[Bubble] = []
        if any(sample.marks for sample in self._chunks.samples):
            name = schedule_name(self._stages.schedule)
            traces.append(windows.trace(self._chunks.samples, rank=rank, schedule=name))
            bubbles += windows.device_bubbles(self._chunks.samples, rank=rank)
        if any(sample.marks for sample in self._network.samples):
            if not traces:
                bubbles += windows.wait_bubble(maybe(data_wait_s), rank=rank)
                traces.append(windows.trace(self._network.samples, rank=rank))
            bubbles += windows.network_bubbles(self._network.samples, rank=rank)
        return RankWindows(traces=tuple(traces), bubbles=tuple(bubbles))
