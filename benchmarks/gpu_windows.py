"""Copies of a GPU in idle windows, beside lazy ones: the second part of `make bench-gpu-engine`.

The example's model as the only stage of torch's 1F1B, so that hooks, marks and gate are those of a
user's pipeline; between forward and backward of a micro-batch the device waits for a time (a
spinning kernel), as it would for other stages.  autockpt takes a snapshot at every iteration,
copied lazily and in windows; each schedule against iterations without, right before.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.gpu_engine import NEVER, DeviceJob, Figures, Ours, one_round, rest, say
from benchmarks.harness import Row, row

MICROBATCHES = 4
SCHEDULES = ("lazy", "windows")
SPIN = 10**7
"""Cycles of the kernel that tells how long a cycle is."""


class Logits(torch.nn.Module):
    """The example's model without its loss: a pipeline computes that behind the last stage."""

    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape [batch, time] in, [batch, time, vocabulary] out."""
        x = self.gpt.blocks(self.gpt.token(tokens) + self.gpt.position)
        logits: torch.Tensor = self.gpt.head(self.gpt.norm(x))
        return logits


class GappedJob(DeviceJob):
    """One stage, and a wait of `gap_s` between the chunks of each micro-batch."""

    def __init__(
        self, size: str, tokens: int, batch: int, device: torch.device, gap_s: float
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        super().__init__(size, tokens, max(batch, MICROBATCHES), device)
        self.model = Logits(self.model)
        self._gap_s, self._cycles = gap_s, int(gap_s / cycle_s(device))
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        stage = PipelineStage(self.model, 0, 1, device)
        self._schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=self._loss)

    def iterate(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            self._schedule.step(self.batch[:, :-1], target=self.batch[:, 1:])
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":
            torch.cuda._sleep(self._cycles)
        else:
            time.sleep(self._gap_s)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def cycle_s(device: torch.device) -> float:
    """Seconds of one cycle of a spinning kernel; of no meaning on a CPU."""
    if device.type != "cuda":
        return 1.0
    torch.cuda._sleep(SPIN)
    rest(device)
    began = time.perf_counter()
    torch.cuda._sleep(SPIN)
    rest(device)
    return (time.perf_counter() - began) / SPIN


def measure_windows(
    args: argparse.Namespace, folder: Path, device: torch.device
) -> tuple[list[Row], dict[str, Any]]:
    """Both schedules; rows, and what moved where."""
    from autockpt.values import telemetry as t

    job = GappedJob(args.windows_size, args.tokens, args.batch, device, args.gap_s)
    for _ in range(3):
        job.iterate()
    rows: list[Row] = []
    told: dict[str, Any] = {"gap_s": args.gap_s, "size": args.windows_size}
    for schedule in SCHEDULES:
        name = f"autockpt, {schedule}"
        ours = Ours(job, folder / schedule, NEVER, schedule=schedule)
        ours.warm()
        figures, began = Figures(), time.monotonic()
        for turn in range(args.rounds + 1):
            one_round(job, ours, args.iterations, turn, figures if turn else Figures())
            say(f"windows, round {turn} {schedule}")
        used = ours.events(t.IdleWindowsUsed, began)
        ours.close()
        shutil.rmtree(folder / schedule, ignore_errors=True)
        rows += [
            row(name, "end-to-end with gaps", figures.ratios, "x"),
            row(name, "stall with gaps", [s * 1e3 for s in figures.stalls_s], "ms"),
        ]
        if schedule == "windows":
            moved = [e.window_bytes + e.overlap_bytes + e.fence_bytes for e in used]
            pairs = zip(used, moved, strict=True)
            shares = [e.window_bytes / total for e, total in pairs if total]
            reason = used[-1].reason if used else "no snapshot was held back"
            rows.append(row(name, "bytes in windows", shares, "fraction", note=reason))
            told["windows_reason"] = reason
    return rows, told
