"""A small byte-level GPT, trained on the source of the standard library in plain PyTorch.

All that a real training carries is here, and small: AdamW, a schedule, dropout, accumulation, bf16,
a shuffling loader with state, one process or DDP.  All that autockpt needs is in `train`: `attach`,
and `ckpt.batches` as the loop.  Start it, kill it, start it again: it resumes at the same step,
batch and random numbers.  `--digest` prints the same line as a run that was never killed.

        python examples/gpt/train.py --size 1m --digest --run-dir runs/one
        torchrun --nproc-per-node 2 examples/gpt/train.py --size 1m --digest --run-dir runs/two
        python examples/gpt/train.py --no-checkpoint        # the bare script, to compare with
"""

import argparse
import contextlib
import hashlib
import itertools
import math
import os
import random
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group exists, see `main`
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

VOCABULARY = 256  # one token is one byte
SIZES = {  # name: (width, layers, heads); about 12 * layers * width^2 parameters
    "tiny": (32, 1, 2),
    "1m": (128, 5, 4),
    "10m": (320, 8, 5),
    "60m": (640, 12, 10),
    "125m": (896, 13, 14),
    "350m": (1024, 28, 16),
    "1b": (2048, 20, 16),
}


class Block(nn.Module):
    """Attention, then a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(up, nn.GELU(), down)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape [batch, time, width] in and out."""
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, width / heads]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """A decoder-only transformer; the embedding is also the output matrix (tied weights)."""

    def __init__(self, size: str, sequence: int, dropout: float) -> None:
        super().__init__()
        width, layers, heads = SIZES[size]
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(sequence, width))
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss (nats per byte) of predicting `targets`; both are [batch, time]."""
        self.tokens_seen += tokens.numel()
        x = self.blocks(self.token(tokens) + self.position)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def standard_library_text(limit_bytes: int) -> torch.Tensor:
    """The first `limit_bytes` of the standard library's modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = bytearray().join(path.read_bytes() for path in files)
    return torch.frombuffer(text, dtype=torch.uint8)[:limit_bytes]


class TextLoader:
    """Windows of the text in a new order every epoch, shared out among ranks; it knows its place.

    `position` counts the windows that all ranks together have taken in this epoch.  So a resume
    with another number of ranks continues at the same text.  The order follows from seed and epoch
    alone: the loader draws nothing from the global generators.
    """

    def __init__(
        self, text: torch.Tensor, sequence: int, batch: int, seed: int, rank: int, world_size: int
    ) -> None:
        self.windows = text.unfold(0, sequence + 1, sequence)  # [windows, sequence + 1], a view
        self.batch, self.rank, self.taken_per_step = batch, rank, batch * world_size
        self.seed, self.epoch, self.position = seed, 0, 0
        if self.taken_per_step > len(self.windows):
            raise SystemExit(f"a step takes {self.taken_per_step} of {len(self.windows)} windows")

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the rest of this epoch, each batch [batch, sequence + 1] uint8."""
        epoch = self.epoch
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.windows), generator=generator)
        while self.epoch == epoch:
            start = self.position + self.rank * self.batch
            # Moved on before the yield: while a batch is trained, the state already says "next".
            self._move_to(epoch, self.position + self.taken_per_step)
            yield self.windows[order[start : start + self.batch]]

    def _move_to(self, epoch: int, position: int) -> None:
        """Stand there, or at the next epoch's start if no whole step is left in this one."""
        whole_step_left = position + self.taken_per_step <= len(self.windows)
        self.epoch, self.position = (epoch, position) if whole_step_left else (epoch + 1, 0)

    def state_dict(self) -> dict[str, int]:
        """Where the next batch comes from."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there; the next iterator starts from it."""
        self.seed = state["seed"]
        self._move_to(state["epoch"], state["position"])

    def reshard_state(self, states: Sequence[Any], rank: int, world_size: int) -> dict[str, int]:
        """Return the state for a rank that other ranks saved: all have the same."""
        return next(state for state in states if state is not None)


def bare_batches(loader: TextLoader, total: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The loop of `--no-checkpoint`: `total` steps, and as many epochs as they need."""
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    # The range comes first, so that zip does not draw a batch without a step for it.
    yield from zip(range(total), epochs, strict=False)


def learning_rate_factor(step: int, horizon: int) -> float:
    """Linear warm-up over the first tenth of `horizon` steps, then a cosine down to a tenth."""
    warmup = 1 + horizon // 10
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, horizon - warmup))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


def build(
    args: argparse.Namespace, device: torch.device, rank: int, world_size: int
) -> tuple[Any, torch.optim.Optimizer, LambdaLR, TextLoader]:
    """Build the model, the optimizer, the schedule and the loader."""
    torch.manual_seed(args.seed)  # the same weights on every rank ...
    model: Any = GPT(args.size, args.sequence, args.dropout).to(device)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(args.seed * 1000 + rank)  # ... and other dropout on each
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if world_size > 1:
        model = nn.parallel.DistributedDataParallel(model)

    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=args.fused or None)
    horizon = args.horizon or args.steps
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, horizon))
    text, batch = standard_library_text(args.text_bytes), args.batch * args.accumulation
    loader = TextLoader(text, args.sequence, batch, args.seed, rank, world_size)
    return model, optimizer, scheduler, loader


def train(args: argparse.Namespace, device: torch.device, rank: int, world_size: int) -> None:
    """Train up to `args.steps`, from wherever the last run got to."""
    model, optimizer, scheduler, loader = build(args, device, rank, world_size)

    if args.checkpoint:
        import autockpt

        ckpt = autockpt.attach(
            model=model, optimizer=optimizer, scheduler=scheduler, data=loader, run_dir=args.run_dir
        )
        batches = ckpt.batches(args.steps)
    else:
        batches = bare_batches(loader, args.steps)

    if rank == 0:
        count = sum(p.numel() for p in model.parameters())
        print(f"{args.size}: {count:,} parameters, {world_size} x {device.type}", flush=True)
    log = args.log.open("a", buffering=1) if args.log and rank == 0 else None
    since, steps = time.perf_counter(), 0
    for step, batch in batches:
        # A little noise, drawn with numpy and Python: a resume has to bring their generators back.
        noisy = torch.from_numpy(numpy.random.random(batch.shape) < 0.01)
        batch = batch.masked_fill(noisy, random.randrange(VOCABULARY))
        step_loss = torch.zeros((), device=device)
        micro_batches = batch.to(device).long().split(args.batch)
        for i, micro in enumerate(micro_batches):
            # Ranks add up their gradients once a step: with the last micro-batch.
            last = i + 1 == len(micro_batches)
            with contextlib.nullcontext() if last or world_size == 1 else model.no_sync():
                with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bf16"):
                    loss = model(micro[:, :-1], micro[:, 1:]) / len(micro_batches)
                loss.backward()
            step_loss += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        steps += 1
        if log:
            print(step, step_loss.item(), file=log)
        if rank == 0 and (step + 1) % args.log_every == 0:
            now = time.perf_counter()
            ms_per_step = 1000 * (now - since) / steps
            print(f"step {step}  loss {step_loss.item():.4f}  {ms_per_step:.1f} ms", flush=True)
            since, steps = now, 0

    if args.digest:
        digest = state_digest(model, optimizer, scheduler, loader, device, world_size)
        if rank == 0:
            print(f"digest: {digest}", flush=True)


def feed(hasher: Any, value: Any) -> None:
    """Feed nested state to `hasher`: types, shapes and every bit; mappings in order of keys."""
    if isinstance(value, numpy.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype} {list(value.shape)}\n".encode())
        hasher.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        hasher.update(f"mapping {len(value)}\n".encode())
        for key in sorted(value, key=repr):
            feed(hasher, key)
            feed(hasher, value[key])
    elif isinstance(value, list | tuple):
        hasher.update(f"{type(value).__name__} {len(value)}\n".encode())
        for item in value:
            feed(hasher, item)
    else:
        hasher.update(f"{type(value).__name__} {value!r}\n".encode())


def state_digest(
    model: nn.Module, optimizer: Any, scheduler: Any, loader: Any, device: torch.device, ranks: int
) -> str:
    """One digest of all that decides how training goes on, on all ranks."""
    hasher = hashlib.blake2b(digest_size=16)
    model = getattr(model, "module", model)  # what DDP wraps
    feed(hasher, dict(model.named_parameters()))  # a tied tensor counts once, an untied one twice
    feed(hasher, dict(model.named_buffers()))
    feed(hasher, [part.state_dict() for part in (optimizer, scheduler, loader)])
    feed(hasher, [random.getstate(), numpy.random.get_state(), torch.get_rng_state()])
    if device.type == "cuda":
        feed(hasher, torch.cuda.get_rng_state(device))
    digests = [hasher.hexdigest()] * ranks
    if ranks > 1:
        dist.all_gather_object(digests, hasher.hexdigest())
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


def start_process(args: argparse.Namespace) -> tuple[torch.device, int, int]:
    """Join the process group if torchrun started us; returns (device, rank, world size)."""
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        # Attention's backward adds in any order otherwise, and two equal runs differ in last bits.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    if "RANK" not in os.environ:
        return device, 0, 1
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device, dist.get_rank(), dist.get_world_size()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step")
    parser.add_argument("--horizon", type=int, help="steps of the schedule; default: --steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4, help="windows per micro-batch and rank")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--sequence", type=int, default=64, help="bytes per window")
    parser.add_argument("--text-bytes", type=int, default=4_000_000, help="text to train on")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of autocast")
    parser.add_argument("--fused", action="store_true", help="the fused AdamW")
    parser.add_argument("--threads", type=int, help="CPU threads of this process")
    parser.add_argument("--run-dir", help="of python and torchrun (runs/train)")
    parser.add_argument("--checkpoint", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--digest", action="store_true", help="print a digest of the final state")
    parser.add_argument("--log-every", type=int, default=10, help="steps between printed lines")
    parser.add_argument("--log", type=Path, help="append `step loss` lines to this file (rank 0)")
    return parser.parse_args()


def main() -> None:
    """Join, train, leave."""
    args = arguments()
    device, rank, world_size = start_process(args)
    train(args, device, rank, world_size)
    if dist.is_initialized():
        # Only now that `train` has returned: gloo's threads end when no object holds the group, DDP
        # included, and if they still run at exit the process aborts now and then.  The early import
        # above serves the same: imported later, as DDP does, that module holds the group for good.
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
