"""A training of timed waits, with or without an all-reduce after each: 12 MB of state a rank.

As it stands it leaves its network alone; `--layers 6 --wait-ms 20 --kib 512` uses a third of 400
Mbit/s.
"""

import argparse
import hashlib
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
    parser.add_argument("--digest", action="store_true", help="print one of all ranks' state")
    parser.add_argument("--bare", action="store_true", help="without autockpt")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.Adam(model.parameters())
    gradients, batch = torch.zeros(given.kib * 256), torch.randn(8, 1024)
    ckpt = None if given.bare else autockpt.attach(model=model, optimizer=optimizer)
    for _ in range(given.steps) if ckpt is None else ckpt.steps(given.steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for _ in range(given.layers):
            time.sleep(given.wait_ms / 1e3)
            if given.kib:
                dist.all_reduce(gradients)
        optimizer.step()
    if given.digest:
        print_digest(model, optimizer)
    dist.destroy_process_group()


def print_digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """On rank 0, of the values of all ranks."""
    hasher = hashlib.blake2b(digest_size=16)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    for tensor in [*model.parameters(), *moments]:
        hasher.update(tensor.detach().numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, hasher.hexdigest())
    if dist.get_rank() == 0:
        print(f"digest: {hashlib.blake2b(''.join(digests).encode(), digest_size=16).hexdigest()}")


if __name__ == "__main__":
    main()
