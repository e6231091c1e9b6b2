"""A training that `autockpt profile` is given by benchmarks/codecs_training.py.

python benchmarks/compression/trained.py SIZE TOKENS
"""

import sys

import autockpt
from benchmarks.job import Job

STEPS = 10**6
"""A profile ends it long before."""


def main(size: str, tokens: int) -> None:
    """Trains until somebody ends it."""
    job = Job(size, tokens)
    checkpoint = autockpt.attach(model=job.model, optimizer=job.optimizer)
    for _ in checkpoint.steps(STEPS):
        job.iterate()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
