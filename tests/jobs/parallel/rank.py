"""What one process of a matrix test does; a zygote forks it."""

import datetime
import importlib
import os
import signal
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_S = 60.0
"""A machine under test answers late; a save that is skipped for that would prove nothing."""


def train(
    *, mesh: str, seed: int, tied: bool, run_dir: str, out: str, steps: int, end: str, more: int,
    evaluate: bool = False, automatic: bool = False,
) -> None:  # fmt: skip
    """Trains up to `steps` under autockpt, then `more` without; rank-N.pt holds what it saw.

    `end` of the part under autockpt: "save" a last checkpoint, "leave" without one, or "die" when
    the checkpoints that were begun are durable.  `evaluate`: a forward without a backward ahead of
    attach and of every boundary; `automatic`: the optimizer's step tells where a boundary is.

    `attached`: the whole state right after attach, when something was restored; `saved` and
    `ended`: after the last step under autockpt, and at the end; `losses`: by step.
    """
    import autockpt
    from autockpt.session import saving
    from tests.jobs.parallel.meshes import MESHES
    from tests.jobs.parallel.model import Net
    from tests.jobs.parallel.ruled import RULED

    saving.GRANT_WAIT_S = PATIENCE_S
    _join(out)
    ruled = RULED.get(mesh)
    make = partial(Net, seed, tied=tied)
    training = ruled.build(seed) if ruled is not None else MESHES[mesh].build(make)
    if evaluate:
        training.evaluate()
    session: Any = autockpt.attach(
        model=training.model, optimizer=training.optimizer, scheduler=training.scheduler,
        run_dir=run_dir, **training.attach,
    )  # fmt: skip
    start = session.step_count
    attached = training.full_state() if start else {}
    losses = {}
    for step in range(start, steps):
        losses[step] = training.train_step(step)
        if evaluate:
            training.evaluate()
        if not automatic:
            session.step()
        if end == "die":
            _wait_ready(session)
    saved = training.full_state()
    if end == "die":
        session.wait_durable(PATIENCE_S)
    else:
        session.close(final_checkpoint=end == "save")
    for step in range(steps, steps + more):
        losses[step] = training.train_step(step)
    seen = {"start": start, "attached": attached, "saved": saved, "losses": losses}
    seen["ended"] = training.full_state() if more else saved
    torch.save(seen, Path(out) / f"rank-{os.environ['RANK']}.pt")
    dist.barrier()
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_ready(session: Any) -> None:
    """Else the steps are over before there is a slot, and there is nothing to come back to."""
    deadline = time.monotonic() + PATIENCE_S
    while not session.ready and time.monotonic() < deadline:
        time.sleep(0.002)


def _join(out: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/store", rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]), timeout=datetime.timedelta(seconds=PATIENCE_S),
    )  # fmt: skip


def warm() -> None:
    """Imports and caches what the meshes need, before there are threads.

    The first operations of DTensors take seconds: two trainings, divided over a process group that
    does nothing.  It has a number of ranks that no test has, because DTensors remember what a part
    looks like on this rank by the shape of the mesh.

    A torch that is built for CUDA starts threads at the first backward: only imports there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch.distributed.optim")
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    from tests.jobs.parallel.meshes import MESHES
    from tests.jobs.parallel.model import Net

    for mesh in () if torch.backends.cuda.is_built() else ("fsdp2-2", "tp-2"):
        dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=5)
        training = MESHES[mesh].build(partial(Net, 0))
        training.train_step(0)
        training.full_state()
        dist.destroy_process_group()
