"""A loop with Fabric over the samples of the contract."""

import os
import warnings
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

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
    warnings.simplefilter("ignore")
    fabric = L.Fabric(
        accelerator="cpu", devices=case.ranks, strategy="ddp" if case.ranks > 1 else "auto"
    )
    fabric.launch()
    seed()
    data, inner = Samples(case), Model(watch)
    plain = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(inner, plain)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(plain, 100)
    loader: Any = DataLoader(
        data, batch_size=BATCH, shuffle=True, num_workers=case.workers,
        persistent_workers=case.persistent,
    )  # fmt: skip
    loader, evaluation = fabric.setup_dataloaders(loader, DataLoader(data, batch_size=BATCH))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "done": 0}
    watch.follow(lambda: {
        "model": inner, "optimizer": plain, "scheduler": scheduler, "counters": state["done"]
    })  # fmt: skip
    losses: list[float] = []
    file, ckpt, first, skip = os.path.join(watch.folder, "own.ckpt"), None, 0, 0
    if how == "protected":
        from autockpt.integrations.lightning import attach

        ckpt = attach(fabric, state)
        loader = ckpt.loader(loader)
        first = loader.epoch
    if how == "own" and os.path.exists(file):
        fabric.load(file, state)
        first, skip = divmod(state["done"], len(loader))
    for _ in range(first, EPOCHS):
        for batch in loader:
            if skip:
                skip -= 1
                continue
            ends = (state["done"] + 1) % case.accumulation == 0
            with fabric.no_backward_sync(model, enabled=not ends):
                fabric.backward(model(**batch)["loss"] / case.accumulation)
            if ends:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            state["done"] += 1
            steps = state["done"] // case.accumulation
            if ends and case.evaluate_every and steps % case.evaluate_every == 0:
                with torch.no_grad():
                    losses.extend(float(model(**each)["loss"]) for each in evaluation)
            if ckpt is not None:
                ckpt.step()
            if how == "own" and state["done"] % (OWN_EVERY * case.accumulation) == 0:
                fabric.save(file, state)
        torch.rand(1)  # what a script does at the end of an epoch
    if ckpt is not None:
        ckpt.close()
    watch.end()


if __name__ == "__main__":
    run(train)
