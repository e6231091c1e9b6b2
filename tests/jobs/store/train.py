"""A training that draws random numbers in every step; it prints a digest of its end."""

import argparse
import hashlib
import os
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autockpt
from autockpt.values.goal import Goal


def main() -> None:
    """Trains, with a process group where a launcher gave one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--ddp", action="store_true", help="with the same seed on all ranks")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--url", help="of the checkpoints, without `autockpt run`")
    options = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank if options.seed is None else options.seed)
    model: nn.Module = nn.Sequential(
        nn.Linear(16, options.width), nn.ReLU(), nn.Linear(options.width, 16)
    )
    if options.ddp:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps: Iterable[int] = range(options.steps)
    if not options.bare:
        goal = Goal(storage_path=options.url) if options.url else None
        steps = autockpt.attach(model=model, optimizer=optimizer, goal=goal).steps(options.steps)
    for _ in steps:
        batch = torch.randn(8, 16)
        loss = ((model(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(float(os.environ.get("TEST_PACE_S", "0")))
    print(f"digest of rank {rank}: {_digest(model, optimizer)}", flush=True)


def _digest(model: nn.Module, optimizer: Any) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    for state in optimizer.state.values():
        for value in state.values():
            digest.update(value.numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
