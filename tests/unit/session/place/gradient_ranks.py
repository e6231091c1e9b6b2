"""Three gloo ranks that train in DDP, and wrap the model anew in the middle as a restart does.

    python -m tests.unit.session.place.gradient_ranks FOLDER

leaves `FOLDER/RANK.json`: by case the digests of the parameters after each iteration.
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autockpt.session.place.gradient_buckets import GradientBuckets

RANKS, STEPS, WRAPPED_AGAIN = 3, 8, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "several buckets": {"bucket_cap_mb": 0.02},
    "views": {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True},
    "static": {"bucket_cap_mb": 0.02, "static_graph": True},
}


def summed(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of the script's own, which doubles the mean."""
    tensor = bucket.buffer().mul_(2.0 / RANKS)
    done = dist.all_reduce(tensor, async_op=True)
    assert done is not None
    return done.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


class Losses(torch.nn.Module):
    """The model and its loss, in one wrapper as some scripts have it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        return self.model(batch).square().mean()  # type: ignore[no-any-return]


def trained(restart: str, *, hook: bool, **options: Any) -> list[str]:
    """`restart`: no, plain (the model is wrapped anew), kept (with its buckets), late (kept, and
    wrapped behind `attach`), or torn (one rank has other buckets)."""
    torch.manual_seed(0)
    sizes = (40, 64, 64, 7)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def wrapped() -> Any:
        part = Losses(model) if hook else model
        made = DistributedDataParallel(part, **options)
        if hook:
            made.register_comm_hook(None, summed)
        return made

    wrapper, found = wrapped(), []
    trained_steps: list[int] = []
    buckets = GradientBuckets({"model": model}, has_trained=lambda: bool(trained_steps))
    for step in range(STEPS):
        if step == WRAPPED_AGAIN and restart != "no":
            layouts = buckets.layouts()
            del wrapper
            trained_steps.clear()
            if restart != "late":
                wrapper = wrapped()
            buckets = GradientBuckets({"model": model}, has_trained=lambda: bool(trained_steps))
            if restart == "torn" and dist.get_rank() == 1:  # it would sum other gradients
                layouts = {name: [layout[::-1] for layout in one] for name, one in layouts.items()}
            left = buckets.put_back({} if restart == "plain" else layouts)
            assert left == (["model"] if restart == "torn" else [])
            if restart == "late":
                wrapper = wrapped()
        seed = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        batch = torch.randn(16, 40, generator=seed)
        (wrapper(batch) if hook else wrapper(batch).square().mean()).backward()
        optimizer.step()
        trained_steps.append(step)
        optimizer.zero_grad()
        held = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
        found.append(hashlib.sha256(held).hexdigest()[:12])
    return found


def rank_main(folder: Path, rank: int) -> None:
    """All cases of one rank."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    ways: dict[str, Callable[[str], list[str]]] = {
        name: (lambda restart, o=options: trained(restart, hook=False, **o))  # type: ignore[misc]
        for name, options in OPTIONS.items()
    }
    ways["hook"] = lambda restart: trained(restart, hook=True, bucket_cap_mb=0.02)
    found = {
        name: {restart: way(restart) for restart in ("no", "plain", "kept", "late", "torn")}
        for name, way in ways.items()
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


def main(folder: Path) -> int:
    """Forks the ranks; the exit code."""
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(Exception):
                try:
                    rank_main(folder, rank)
                    code = 0
                except Exception:
                    traceback.print_exc()
            os._exit(code)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
