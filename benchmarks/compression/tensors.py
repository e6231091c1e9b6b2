"""Tensors of a real training at several moments, kept between runs in the user's cache.

The example's GPT is trained on the example's text; weights and both moments of AdamW are written at
the end, 1, 10 and 100 steps before it, and once soon after the warm-up.  Of every class pieces are
taken, spread evenly over all tensors in the optimizer's order, as a checkpoint's chunks have them.
bf16 is the fp32 run rounded to the nearest, as a mixed-precision training keeps its weights.
"""

import argparse
import importlib.util
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.job import EXAMPLE

CLASSES = ("weights", "first moment", "second moment")
GAPS = (1, 10, 100)
PIECE_ELEMENTS = 2 * 2**20
"""8 MiB of fp32: the default chunk."""
LEARNING_RATE = 6e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What was trained; its folder is named by it, so that no other training is taken for it."""

    kept: Path
    """Where trainings are kept."""
    size: str = "60m"
    steps: int = 300
    """With a warm-up of a tenth; more than the largest gap."""
    sequence: int = 96
    batch: int = 4
    pieces: int = 4
    """Per class and moment, of PIECE_ELEMENTS."""

    @property
    def early_step(self) -> int:
        """Soon after the warm-up."""
        return self.steps // 5

    @property
    def folder(self) -> Path:
        """Of this one."""
        name = f"{self.size}-{self.steps}-{self.sequence}x{self.batch}-{self.pieces}"
        return self.kept / name

    def file(self, tensor_class: str, step: int) -> Path:
        """fp32, little-endian."""
        return self.folder / f"{tensor_class.replace(' ', '-')}-{step}.f32"

    @property
    def moments(self) -> tuple[int, ...]:
        """Steps after which tensors are kept."""
        return (self.early_step, *(self.steps - gap for gap in reversed(GAPS)), self.steps)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is trained, and where it is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = Path(cache) / "autockpt" / "tensors"
    parser.add_argument("--state", default="60m", help="size of the example's model")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--keep", type=Path, default=kept, help="folder of trained tensors")


def chosen(args: argparse.Namespace) -> Training:
    """The training of parsed options."""
    return Training(kept=args.keep, size=args.state, steps=args.steps, batch=args.batch)


def tensors(training: Training) -> str:
    """Trains unless that was done before; one line that says what it was."""
    note = training.folder / "note.txt"
    if not note.exists():
        training.folder.mkdir(parents=True, exist_ok=True)
        note.write_text(_train(training))
    return note.read_text()


def read(training: Training, tensor_class: str, step: int, dtype: str) -> np.ndarray[Any, Any]:
    """The pieces of a class as unsigned words; `dtype` is fp32 or bf16."""
    words = np.fromfile(training.file(tensor_class, step), dtype="<u4")
    if dtype == "fp32":
        return words
    nearest = words.astype(np.uint64) + 0x7FFF + ((words >> 16) & 1)  # ties to even
    return (nearest >> 16).astype("<u2")


def _train(training: Training) -> str:
    example: Any = _example()
    torch.manual_seed(0)
    model = example.GPT(training.size, training.sequence, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    text = example.standard_library_text(2**24)
    batches = iter(example.TextLoader(text, training.sequence, training.batch, 0, 0, 1))
    count, began, loss = sum(p.numel() for p in model.parameters()), time.monotonic(), 0.0
    for step in range(1, training.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, 10 * step / training.steps)
        batch = next(batches).long()
        mean = model(batch[:, :-1], batch[:, 1:])
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = mean.item()
        if step in training.moments:
            _keep(training, model, optimizer, step)
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.3f}, {time.monotonic() - began:.0f} s",
                  file=sys.stderr, flush=True)  # fmt: skip
    return (
        f"GPT of {count / 1e6:.1f} M parameters, AdamW, fp32, {training.steps} steps of "
        f"{training.batch * training.sequence} bytes of text, final loss {loss:.2f} nats a byte"
    )


def _keep(training: Training, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    states = [(p.detach(), optimizer.state[p]) for p in model.parameters()]
    flat = (
        torch.cat([p.flatten() for p, _ in states]),
        torch.cat([state["exp_avg"].flatten() for _, state in states]),
        torch.cat([state["exp_avg_sq"].flatten() for _, state in states]),
    )
    for tensor_class, values in zip(CLASSES, flat, strict=True):
        _spread(values.numpy(), training.pieces).tofile(training.file(tensor_class, step))


def _spread(values: np.ndarray[Any, Any], pieces: int) -> np.ndarray[Any, Any]:
    if len(values) <= pieces * PIECE_ELEMENTS:
        return values
    step = (len(values) - PIECE_ELEMENTS) // (pieces - 1)
    return np.concatenate([values[i * step :][:PIECE_ELEMENTS] for i in range(pieces)])


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("gpt_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Trains, so that a run of the benchmark need not."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_options(parser)
    torch.set_num_threads(os.cpu_count() or 1)
    print(tensors(chosen(parser.parse_args())))


if __name__ == "__main__":
    main()
