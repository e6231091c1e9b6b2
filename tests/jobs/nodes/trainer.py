"""One rank of a job whose nodes are network namespaces; forked by the zygote of the kill tests.

Each rank's state is its own, so that a shard that comes back to the wrong rank shows; after every
step the ranks wait for each other, as those of a real training do.
"""

import ctypes
import datetime
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import trainings

CLONE_NEWNET = 0x40000000


def run(spec: dict[str, Any], run_dir: str, out: str, namespace: str) -> None:
    """Train on the node of this name; the file `limit` beside `out` holds the job at a step."""
    folder, rank = Path(out), meet(namespace)
    import autockpt

    job = trainings.build(trainings.JobSpec(**spec), rank=rank)
    ckpt = autockpt.attach(**job.attached, run_dir=run_dir)
    say_started(folder, rank, ckpt.step_count)
    reached = trainings.StepCell(folder / "step")
    limit = trainings.StepCell(folder.parent / "limit")
    everybody = torch.zeros(())
    for step, batch in ckpt.batches(job.spec.steps):
        while limit.get() <= step:
            time.sleep(0.002)
        reached.set(step + 1)
        trainings.train_step(job, step, batch)
        dist.all_reduce(everybody)
    trainings.say(folder, event="finished", rank=rank, digest=trainings.digest(job))


def meet(namespace: str) -> int:
    """The rank of this process, on its node and in its process group."""
    enter(namespace)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['TEST_STORE']}", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    return rank


def say_started(folder: Path, rank: int, step: int) -> None:
    """Where this start goes on."""
    trainings.say(folder, event="started", rank=rank, step=step, start=number_of_start())


def number_of_start() -> int:
    """Of this process among the starts of its job, from 0."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def enter(namespace: str) -> None:
    """This process, and what it starts, is on that node from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(fd, CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)
