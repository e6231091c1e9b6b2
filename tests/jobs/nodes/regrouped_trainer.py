"""One rank of a job that goes on with another number of ranks: DDP, FSDP2, or FSDP2 in pairs.

Every rank says the digest of the whole state before each step, so that what was restored can be
compared with what the former ranks had at that step.
"""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.jobs.nodes.trainer import meet, number_of_start, say_started
from tests.support import trainings

ASTRAY = 30


def run_ddp(spec: dict[str, Any], run_dir: str, out: str, namespace: str) -> None:
    """Every rank has all of it."""
    _run(spec, run_dir, Path(out), namespace, DistributedDataParallel)


def run_astray(spec: dict[str, Any], run_dir: str, out: str, namespace: str) -> None:
    """DDP, and rank 1 leaves the others after step `ASTRAY`: they are no replicas any more."""
    _run(spec, run_dir, Path(out), namespace, DistributedDataParallel, astray=1)


def run_fsdp2(spec: dict[str, Any], run_dir: str, out: str, namespace: str) -> None:
    """Parameters and their state are cut by rows."""
    _run(spec, run_dir, Path(out), namespace, fully_shard)


def run_hsdp(spec: dict[str, Any], run_dir: str, out: str, namespace: str) -> None:
    """Two ranks cut it by rows, and as many other pairs as there are hold the same."""

    def pairs(model: torch.nn.Module) -> torch.nn.Module:
        size = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh("cpu", size, mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh)

    _run(spec, run_dir, Path(out), namespace, pairs)


def _run(
    spec: dict[str, Any],
    run_dir: str,
    folder: Path,
    namespace: str,
    wrap: Callable[[torch.nn.Module], torch.nn.Module],
    *,
    astray: int | None = None,
) -> None:
    rank = meet(namespace)
    import autockpt

    model = build(spec["width"])
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    ckpt = autockpt.attach(model=wrapped, optimizer=optimizer, run_dir=run_dir)
    say_started(folder, rank, ckpt.step_count)
    limit = trainings.StepCell(folder.parent / "limit")
    for step in ckpt.steps(spec["steps"]):
        digest = _digest(model, optimizer)
        trainings.say(folder, event="state", step=step, start=number_of_start(), digest=digest)
        while limit.get() <= step:
            time.sleep(0.002)
        train_step(wrapped, optimizer, step)
        if step == ASTRAY and rank == astray:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
        time.sleep(spec["pace_s"])
    trainings.say(folder, event="finished", rank=rank, digest=_digest(model, optimizer))
    dist.barrier()


def build(width: int) -> torch.nn.Module:
    """The model before any step."""
    torch.manual_seed(3)
    wide = 2 * width + 1
    return torch.nn.Sequential(
        torch.nn.Linear(24, wide), torch.nn.ReLU(), torch.nn.Linear(wide, 24, bias=False)
    )


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step, on the same batch on all ranks."""
    torch.manual_seed(step)
    model(torch.randn(8, 24)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def undisturbed(width: int, steps: int) -> str:
    """Digest of the end with one rank; with 2, 4, ... ranks under DDP it is the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = build(width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            train_step(model, optimizer, step)
        return _digest(model, optimizer)
    finally:
        torch.set_num_threads(threads)


def _digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters and moments, whole and in order; all ranks take part."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
