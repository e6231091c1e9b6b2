"""A training of timed waits, with or without an all-reduce after each: 12 MB of state a rank.

As it stands it leaves its network alone; `--layers 6 --wait-ms 20 --kib 512` uses a third of 400
Mbit/s.
"""

import argparse
import time

import torch
import torch.distributed as dist

import autockpt


def main() -> None:
    """Trains under whatever launched it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=1, help="waits in an iteration")
    parser.add_argument("--wait-ms", type=float, default=50.0)
    parser.add_argument("--kib", type=int, default=0, help="of each all-reduce; 0: none")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.Adam(model.parameters())
    gradients, batch = torch.zeros(given.kib * 256), torch.randn(8, 1024)
    ckpt = autockpt.attach(model=model, optimizer=optimizer)
    for _ in ckpt.steps(given.steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for _ in range(given.layers):
            time.sleep(given.wait_ms / 1e3)
            if given.kib:
                dist.all_reduce(gradients)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
