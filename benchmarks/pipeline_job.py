"""One rank of a pipeline that trains on gloo, for `benchmarks.bubbles`.

Real: a stage is a stack of linear layers, its chunks take what they take.  Emulated: the compute of
a chunk is a small real kernel and a timed wait, as a host sees a GPU that computes: the core is
free, but nothing of a device is exercised.  The stage's state is `state_bytes` in either case.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

EMULATED_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is trained."""

    schedule: str
    """torch's name."""
    ranks: int
    microbatches: int
    forward_s: float
    """Wait of an emulated forward; the backward waits twice as long.  0: real compute."""
    width: int
    """Of the layers, where compute is real."""
    layers: int
    state_bytes: int
    """Of one rank, parameters and moments, where compute is emulated."""
    rows: int
    """Of a micro-batch."""


class _Wait(torch.autograd.Function):
    """The wait of an emulated device beside a tensor: in the forward, and for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class EmulatedStage(nn.Module):
    """A small layer, waits, and parameters that are only there to be checkpointed.

    Forward, backward for the inputs and backward for the weights wait `forward_s` each.
    """

    def __init__(self, forward_s: float, state_bytes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(EMULATED_WIDTH, EMULATED_WIDTH)
        self.forward_s = forward_s
        count, pieces = state_bytes // 4, 16
        self.bulk = nn.ParameterList(torch.ones(count // pieces) for _ in range(pieces))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A kernel and its waits."""
        wait: Any = _Wait.apply
        weight = wait(self.layer.weight, 0.0, self.forward_s)
        computed = nn.functional.linear(x, weight, self.layer.bias)
        waited: torch.Tensor = wait(torch.relu(computed), self.forward_s, self.forward_s)
        return waited


def real_stage(width: int, layers: int) -> nn.Module:
    """Layers that compute."""
    return nn.Sequential(
        *[m for _ in range(layers) for m in (nn.Linear(width, width, bias=False), nn.ReLU())]
    )


class PipelineJob:
    """This rank's stages, their schedule and optimizer; `step()` is an iteration."""

    def __init__(self, shape: Shape, rank: int) -> None:
        torch.manual_seed(rank)
        self.shape, self.rank = shape, rank
        own = self._own_stages()
        self.model = nn.ModuleList(self._stage() for _ in own)
        self.stages = [
            PipelineStage(module, index, shape.ranks * len(own), torch.device("cpu"))
            for module, index in zip(self.model, own, strict=True)
        ]
        made: Any = schedules.get_schedule_class(shape.schedule)
        single = issubclass(made, schedules.PipelineScheduleSingle)
        given = self.stages[0] if single else self.stages
        self.schedule = made(given, shape.microbatches, loss_fn=_loss)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        width = EMULATED_WIDTH if shape.forward_s else shape.width
        self.batch = torch.randn(shape.rows * shape.microbatches, width)
        self.message_bytes = self.batch.nbytes // shape.microbatches
        """What one stage sends to the next."""

    def _own_stages(self) -> list[int]:
        kind = self.shape.schedule
        if kind in ("GPipe", "1F1B"):
            return [self.rank]
        ranks = self.shape.ranks
        v_shaped = kind in ("ZBVZeroBubble", "DualPipeV")
        return [self.rank, 2 * ranks - 1 - self.rank if v_shaped else self.rank + ranks]

    def _stage(self) -> nn.Module:
        shape, share = self.shape, 1 if self.shape.schedule in ("GPipe", "1F1B") else 2
        if shape.forward_s:
            return EmulatedStage(shape.forward_s / share, shape.state_bytes // share)
        return real_stage(shape.width, shape.layers // share)

    def compute(self) -> None:
        """Forward and backward of all micro-batches."""
        first = any(stage.is_first for stage in self.stages)
        last = any(stage.is_last for stage in self.stages)
        inputs = (self.batch,) if first else ()
        extra: dict[str, Any] = {"target": self.batch, "losses": []} if last else {}
        self.schedule.step(*inputs, **extra)

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def transfer_s(rank: int, ranks: int, nbytes: int, *, messages: int = 100) -> float:
    """Seconds of a message to the next rank and back, halved; ranks 0 and 1 measure, the median.

    Receives are posted ahead, as schedules post them.  Where a rank has one core, a sender whose
    receiver posts later waits for the clock's tick in half of all messages: 1.9 instead of 0.06 ms.
    """
    there, back, times = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4), []
    for _ in range(messages if rank < 2 else 0):
        receive = _posted(dist.irecv, back, 1 - rank)
        began = time.perf_counter()
        send = _posted(dist.isend, there, 1 - rank) if rank == 0 else None
        receive.wait()
        send = send or _posted(dist.isend, there, 1 - rank)
        times.append((time.perf_counter() - began) / 2)
        send.wait()
    found = torch.tensor([statistics.median(times) if times else 0.0])
    dist.broadcast(found, 0)
    return float(found)


def _posted(
    post: Callable[[torch.Tensor, int], dist.Work | None], message: torch.Tensor, peer: int
) -> dist.Work:
    work = post(message, peer)
    assert work is not None, "both ranks are of the group"
    return work
