"""A training whose network idles between collectives: layers of a timed wait and an all-reduce.

12 MB of state a rank; the all-reduces use about a third of a line of 400 Mbit/s.
"""

import argparse
import time

import torch
import torch.distributed as dist

import autockpt

LAYERS, LAYER_S, LAYER_BYTES = 6, 0.02, 2**19


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
    gradients, batch = torch.zeros(LAYER_BYTES // 4), torch.randn(8, 1024)
    ckpt = autockpt.attach(model=model, optimizer=optimizer)
    for _ in ckpt.steps(steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for _ in range(LAYERS):
            time.sleep(LAYER_S)
            dist.all_reduce(gradients)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
