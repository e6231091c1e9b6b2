"""`make bench-adapters`: what an adapter costs the thread that trains, apart from copies.

The drivers of tests/frameworks train the smallest model there, each framework in its environment
(`make test-frameworks` makes them; one that is missing is left out).  Three processes take turns,
one iteration each: bare, with the adapter, and bare once more, which shows the noise of the method.
So the machine is the same for all.  No checkpoint is due.  An iteration is the CPU time of the
thread between two forwards.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import autockpt
from autockpt.values.goal import Goal, Pins
from benchmarks.harness import Row, parse, publish, row
from benchmarks.job import load_example
from tests.contracts.adapter_contract import Framework

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = {
    name: Framework(environment, f"tests/frameworks/{name}_driver.py", package)
    for name, environment, package in (
        ("huggingface", "huggingface", "transformers"), ("accelerate", "accelerate", "accelerate"),
        ("lightning", "lightning", "lightning"), ("fabric", "lightning", "lightning"),
        ("ignite", "ignite", "ignite"), ("deepspeed", "deepspeed", "deepspeed"),
        ("torchtitan", "torchtitan", "torchtitan"),
    )
}  # fmt: skip
TURNS = ("bare", "protected", "bare")
NEVER = 10**9
TOKENS = 32
WARM_ITERATIONS = 10
"""At the beginning of each training, not counted."""
BLOCKS = 10
"""Of successive iterations; each gives one sample, the median of its ratios."""
START_WITHIN_S = 300.0
ITERATION_WITHIN_S = 1.0
"""Longer than one of the smallest model takes on a busy machine."""


def main() -> None:
    """Measures each framework that has an environment, and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FRAMEWORKS)}; none: all")
    parser.add_argument("--iterations", type=int, default=210)
    args = parse(parser, iterations=WARM_ITERATIONS + BLOCKS + 1)
    here = [name for name in args.names or FRAMEWORKS if not FRAMEWORKS[name].missing]
    if not here:
        print("none is installed: make test-frameworks")
        return
    rows: list[Row] = []
    for name in here:
        rows += measured(name, args.iterations)
    settings = {"iterations": args.iterations, "blocks": BLOCKS, "frameworks": here}
    publish("adapters", rows, settings=settings, smoke=args.smoke)


def measured(name: str, iterations: int) -> list[Row]:
    """CPU of an iteration, bare and with the adapter, and their ratios."""
    bare, protected, again = in_turns(name, iterations)
    with_adapter, noise = ratios(protected, bare), ratios(again, bare)
    cost_us = [
        ours - statistics.median(pair)
        for ours, *pair in zip(protected, bare, again, strict=False)
    ]  # fmt: skip
    return [
        row(name, "iteration, bare", blocks(bare), "us"),
        row(name, "adapter", blocks(cost_us), "us"),
        row(name, "with/without", with_adapter, "x", at_most=1.01),
        row(name, "bare/bare: noise", noise, "x"),
    ]


def ratios(ours: Sequence[float], bare: Sequence[float]) -> list[float]:
    """Medians of blocks of ratios of iterations that stood side by side."""
    return blocks([one / other for one, other in zip(ours, bare, strict=False)])


def blocks(samples: Sequence[float]) -> list[float]:
    """The median of each block."""
    size = max(1, len(samples) // BLOCKS)
    starts = range(0, len(samples) - size + 1, size)
    return [statistics.median(samples[start : start + size]) for start in starts][:BLOCKS]


def in_turns(name: str, iterations: int) -> list[list[float]]:
    """By process the CPU time (us) of each iteration that is counted.

    Raises RuntimeError where one of them fails, or does not end.
    """
    framework = FRAMEWORKS[name]
    folder = Path(tempfile.mkdtemp(prefix="bench-adapters-", dir=os.getcwd()))
    pipes = [os.pipe() for _ in TURNS]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, how in enumerate(TURNS):
            place = folder / str(number)
            place.mkdir()
            turn = (pipes[number][0], pipes[(number + 1) % len(TURNS)][1])
            given = [name, how, str(iterations), str(place), *map(str, turn)]
            log = (place / "log").open("wb")
            processes.append(
                subprocess.Popen(
                    [framework.python, "-c", f"import benchmarks.adapters as a; a.train({given})"],
                    cwd=ROOT, pass_fds=turn, stdout=log, stderr=log, start_new_session=True,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
                )
            )  # fmt: skip
        os.write(pipes[0][1], b".")
        for pipe in pipes:
            for end in pipe:
                os.close(end)
        within_s = START_WITHIN_S + len(TURNS) * iterations * ITERATION_WITHIN_S
        for number, process in enumerate(processes):
            if process.wait(within_s):
                said = (folder / str(number) / "log").read_text(errors="replace")
                raise RuntimeError(f"{name}, {TURNS[number]}: ended badly:\n{said[-3000:]}")
        return [json.loads((folder / str(n) / "took").read_text()) for n in range(len(TURNS))]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------------- one of the processes


class Turns:
    """Lets one iteration of this process run at a time; notes what it took."""

    def __init__(self, mine: int, next_one: int) -> None:
        self._mine, self._next = mine, next_one
        self._began_s: float | None = None
        self.took_us: list[float] = []

    def forward_begins(self) -> None:
        """An iteration is over; the others have theirs before this process goes on."""
        if self._began_s is not None:
            self.took_us.append(1e6 * (time.thread_time() - self._began_s))
            self.hand_on()
        os.read(self._mine, 1)  # nothing comes where another has ended
        self._began_s = time.thread_time()

    def hand_on(self) -> None:
        """It is the next one's turn."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._next, b".")


def train(given: Sequence[str]) -> None:
    """(framework, how, iterations, folder, read end, write end): one training, in turns."""
    name, how, iterations, folder, mine, next_one = given
    torch.set_num_threads(1)
    turns = Turns(int(mine), int(next_one))
    driver: Any = importlib.import_module(f"tests.frameworks.{name}_driver")
    getattr(driver, "warm", lambda: None)()
    from tests.contracts.adapter_process import Case

    driver.EPOCHS, driver.BATCH = 1, 1
    driver.Model = lambda watch: SmallModel(turns)
    driver.Samples = lambda case: Tokens(int(iterations))
    driver.SAMPLES = int(iterations)
    os.environ |= {"AUTOCKPT_RUN_DIR": f"{folder}/run", "AUTOCKPT_NO_PROFILE": "1"}
    pins = Pins(memory_interval_steps=NEVER, disk_interval_steps=NEVER, retune=False)
    autockpt.attach = functools.partial(  # type: ignore[assignment]
        autockpt.attach, goal=Goal(pins=pins)
    )
    try:
        driver.train(Case(), Bystander(folder), how)
    finally:
        os.close(turns._next)
        os.close(turns._mine)
    Path(folder, "took").write_text(json.dumps(turns.took_us[WARM_ITERATIONS:]))


class SmallModel(nn.Module):
    """The example's smallest model; says when a forward begins."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.inner = load_example().GPT("1m", TOKENS, 0.0)
        self.__dict__["turns"] = turns

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Loss of a batch."""
        if self.training:
            self.__dict__["turns"].forward_begins()
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
