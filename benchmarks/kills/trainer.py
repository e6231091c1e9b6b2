"""The training that is killed: the example's model under `attach`; also a script to be profiled.

autockpt profile benchmarks/kills/trainer.py --size 10m --tokens 32
"""

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks.job import Job

FOREVER = 10**9


def train(
    size: str,
    tokens: int,
    *,
    steps: int,
    run_directory: str | None,
    told: Callable[[int, Any], None],
) -> None:
    """`told(steps done, session)` after each iteration; without a run directory: unprotected."""
    job = Job(size, tokens)
    if run_directory is None:
        for step in range(steps):
            job.iterate()
            told(step + 1, None)
        return
    import autockpt

    session = autockpt.attach(model=job.model, optimizer=job.optimizer, run_dir=run_directory)
    for step in session.steps(steps):
        job.iterate()
        told(step + 1, session)


def main() -> None:
    """As a script: `autockpt profile` measures it and ends it."""
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="10m")
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    torch.set_num_threads(1)
    train(given.size, given.tokens, steps=FOREVER, run_directory="", told=lambda step, _: None)


if __name__ == "__main__":
    main()
