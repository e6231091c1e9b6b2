"""Three calls that a peer makes of CUDA whether there is one or not.

Imported by the worker, because a process that a peer spawns imports the worker's module again, and
nothing else of ours.
"""

import os

import torch

WANTED = "BENCH_STUB_CUDA"


def apply() -> None:
    """Makes them do nothing, and the current device the CPU."""
    for name in ("synchronize", "set_device"):
        setattr(torch.cuda, name, lambda *_: None)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


if os.environ.get(WANTED):
    apply()
