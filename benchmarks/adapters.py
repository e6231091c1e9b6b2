"""`python -m benchmarks.adapters`: what an adapter costs the thread that trains, apart from copies.

Run it in the environment of a framework (`.venv-accelerate/bin/python -m benchmarks.adapters`).
The drivers of tests/frameworks train the smallest model there, bare and with the adapter in turn,
in one process.  No checkpoint is due.  An iteration is the CPU time of the thread between two
forwards.
"""

import argparse
import functools
import importlib
import importlib.util
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import autockpt
from autockpt.values.goal import Goal, Pins
from benchmarks.harness import Row, parse, publish, row
from benchmarks.job import load_example

PACKAGES = {
    "accelerate": "accelerate", "huggingface": "transformers", "lightning": "lightning",
    "fabric": "lightning", "ignite": "ignite", "deepspeed": "deepspeed", "torchtitan": "torchtitan",
}  # fmt: skip
NEVER = 10**9
TOKENS = 32
WARM_ITERATIONS = 10
"""At the beginning of each training, not counted."""


def main() -> None:
    """Measures each framework that is installed here, and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=150)
    args = parse(parser, pairs=1, iterations=14)
    torch.set_num_threads(1)
    here = [name for name in PACKAGES if importlib.util.find_spec(PACKAGES[name])]
    folder = Path(tempfile.mkdtemp(prefix="bench-adapters-", dir=os.getcwd()))
    rows: list[Row] = []
    try:
        for name in here:
            rows += measured(name, args.pairs, args.iterations, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not here:
        print("none of these is installed here:", ", ".join(PACKAGES))
        return
    settings = {"pairs": args.pairs, "iterations": args.iterations, "frameworks": here}
    publish("adapters", rows, settings=settings, variant=f"_{here[0]}", smoke=args.smoke)


def measured(name: str, pairs: int, iterations: int, folder: Path) -> list[Row]:
    """CPU of an iteration, bare and with the adapter, and their ratio pair by pair."""
    driver: Any = importlib.import_module(f"tests.frameworks.{name}_driver")
    getattr(driver, "warm", lambda: None)()
    took: dict[str, list[float]] = {"bare": [], "protected": []}
    for pair in range(pairs):
        for how, medians in took.items():
            place = folder / f"{name}-{pair}-{how}"
            place.mkdir()
            medians.append(_median_us(driver, how, iterations, place))
    both = list(zip(took["bare"], took["protected"], strict=True))
    return [
        row(name, "iteration, bare", took["bare"], "us"),
        row(name, "adapter", [ours - bare for bare, ours in both], "us"),
        row(name, "with/without", [ours / bare for bare, ours in both], "x", at_most=1.01),
    ]


def _median_us(driver: Any, how: str, iterations: int, folder: Path) -> float:
    from tests.contracts.adapter_process import Case

    stamps: list[float] = []
    driver.EPOCHS, driver.BATCH = 1, 1
    driver.Model = lambda watch: SmallModel(stamps)
    driver.Samples = lambda case: Tokens(iterations)
    driver.SAMPLES = iterations
    os.environ |= {"AUTOCKPT_RUN_DIR": str(folder / "run"), "AUTOCKPT_NO_PROFILE": "1"}
    pins = Pins(memory_interval_steps=NEVER, disk_interval_steps=NEVER, retune=False)
    attach = autockpt.attach
    autockpt.attach = functools.partial(attach, goal=Goal(pins=pins))  # type: ignore[assignment]
    try:
        driver.train(Case(), Bystander(str(folder)), how)
    finally:
        autockpt.attach = attach
    each = [after - before for before, after in itertools.pairwise(stamps)]
    return statistics.median(each[WARM_ITERATIONS:]) * 1e6


class SmallModel(nn.Module):
    """The example's smallest model; notes the CPU time of its thread at each forward."""

    def __init__(self, stamps: list[float]) -> None:
        super().__init__()
        self.inner = load_example().GPT("1m", TOKENS, 0.0)
        self.__dict__["stamps"] = stamps

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Loss of a batch."""
        if self.training:
            self.__dict__["stamps"].append(time.thread_time())
        return {"loss": self.inner(x.long(), labels.long())}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """One sample for each iteration."""

    def __init__(self, count: int) -> None:
        self._tokens = torch.randint(0, 256, (count, TOKENS + 1))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index]
        return {"ids": torch.tensor(index), "x": tokens[:-1], "labels": tokens[1:]}


class Bystander:
    """In place of the contract's watch: looks at nothing."""

    rank = 0

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def follow(self, parts: Callable[[], dict[str, Any]]) -> None:
        """Nothing is compared."""

    def end(self) -> None:
        """Nothing is written."""


if __name__ == "__main__":
    main()
