"""An Engine of Ignite over the samples of the contract."""

import glob
import os
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch.utils.data import DataLoader, DistributedSampler

from tests.contracts.adapter_process import (
    BATCH,
    EPOCHS,
    OWN_EVERY,
    Case,
    Model,
    Samples,
    Watch,
    run,
    seed,
)  # fmt: skip


def train(case: Case, watch: Watch, how: str) -> None:
    """As its documentation shows."""
    if case.ranks > 1:
        idist.initialize("gloo")
    seed()
    data, inner = Samples(case), Model(watch)
    model: Any = torch.nn.parallel.DistributedDataParallel(inner) if case.ranks > 1 else inner
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    sampler: Any = DistributedSampler(data) if case.ranks > 1 else None
    loader: Any = DataLoader(
        data, batch_size=BATCH, shuffle=sampler is None, sampler=sampler,
        num_workers=case.workers, persistent_workers=case.persistent,
    )  # fmt: skip
    evaluation = DataLoader(data, batch_size=BATCH)
    losses: list[float] = []

    def process(engine: Engine, batch: Any) -> float:
        loss = model(**batch)["loss"]
        (loss / case.accumulation).backward()
        number = engine.state.iteration
        if number % case.accumulation == 0:
            torch.nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return float(loss)

    trainer = Engine(process)
    if case.evaluate_every:

        @trainer.on(Events.ITERATION_COMPLETED(every=case.evaluate_every * case.accumulation))
        def evaluate(engine: Engine) -> None:
            with torch.no_grad():
                losses.extend(float(inner(**each)["loss"]) for each in evaluation)

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle(engine: Engine) -> None:
        if sampler is not None:
            sampler.set_epoch(engine.state.epoch)

    @trainer.on(Events.EPOCH_COMPLETED)
    def draw(engine: Engine) -> None:
        torch.rand(1)

    watch.follow(lambda: {
        "model": inner, "optimizer": optimizer, "scheduler": scheduler,
        "counters": [trainer.state.iteration, trainer.state.epoch],
    })  # fmt: skip
    parts = {"trainer": trainer, "model": inner, "optimizer": optimizer, "scheduler": scheduler}
    if how == "own":
        folder = os.path.join(watch.folder, "own")
        saver = Checkpoint(parts, DiskSaver(folder, create_dir=True, require_empty=False))
        every = OWN_EVERY * case.accumulation
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=every), saver)
        if saved := glob.glob(f"{folder}/*.pt"):
            newest = max(saved, key=os.path.getmtime)
            Checkpoint.load_objects(parts, torch.load(newest, weights_only=False))
    if how == "protected":
        from autockpt.integrations import ignite

        ckpt = ignite.attach(trainer, model=model, optimizer=optimizer, scheduler=scheduler)
        loader = ckpt.loader(loader)
    trainer.run(loader, max_epochs=EPOCHS)
    watch.end()
    if case.ranks > 1:
        idist.finalize()


if __name__ == "__main__":
    run(train)
