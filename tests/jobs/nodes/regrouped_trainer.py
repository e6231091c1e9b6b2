"""One rank of a job that goes on with another number of ranks, under DDP or cut by FSDP2.

Every rank says the digest of the whole state before each step, so that what was restored can be
compared with what the former ranks had at that step.
"""

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.jobs.nodes.trainer import meet, number_of_start, say_started
from tests.support import trainings


def run_ddp(spec: dict[str, Any], run_dir: str, out: str, namespace: str) -> None:
    """Every rank has all of it."""
    _run(spec, run_dir, Path(out), namespace, cut=False)


def run_fsdp2(spec: dict[str, Any], run_dir: str, out: str, namespace: str) -> None:
    """Parameters and their state are cut by rows."""
    _run(spec, run_dir, Path(out), namespace, cut=True)


def _run(spec: dict[str, Any], run_dir: str, folder: Path, namespace: str, *, cut: bool) -> None:
    rank = meet(namespace)
    import autockpt

    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 65), torch.nn.ReLU(), torch.nn.Linear(65, 24, bias=False)
    )
    wrapped: torch.nn.Module = fully_shard(model) if cut else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    ckpt = autockpt.attach(model=wrapped, optimizer=optimizer, run_dir=run_dir)
    say_started(folder, rank, ckpt.step_count)
    limit = trainings.StepCell(folder.parent / "limit")
    for step in ckpt.steps(spec["steps"]):
        digest = _digest(model, optimizer)
        trainings.say(folder, event="state", step=step, start=number_of_start(), digest=digest)
        while limit.get() <= step:
            time.sleep(0.002)
        torch.manual_seed(step)
        wrapped(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(spec["pace_s"])
    trainings.say(folder, event="finished", rank=rank, digest=_digest(model, optimizer))
    dist.barrier()


def _digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters and moments, whole and in order; all ranks take part."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
