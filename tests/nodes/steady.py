"""A training that leaves its network alone: 12 MB of state a rank, one scalar reduced a step."""

import argparse
import time

import torch
import torch.distributed as dist

import autockpt


def main() -> None:
    """Trains under whatever launched it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.Adam(model.parameters())
    together, batch = torch.zeros(()), torch.randn(8, 1024)
    ckpt = autockpt.attach(model=model, optimizer=optimizer)
    for _ in ckpt.steps(steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        dist.all_reduce(together)
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
