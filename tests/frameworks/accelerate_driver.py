"""An Accelerate loop over the samples of the contract."""

import glob
import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
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
    config = DataLoaderConfiguration(
        split_batches=case.option == "split_batches",
        dispatch_batches=True if case.option.startswith("dispatch_batches") else None,
        use_seedable_sampler=case.option == "use_seedable_sampler",
    )
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=case.accumulation, dataloader_config=config
    )
    seed()
    data = Samples(case)
    model: torch.nn.Module = Model(watch)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    several = case.ranks if case.option == "split_batches" else 1
    loader = DataLoader(
        data, batch_size=BATCH * several, shuffle=True, num_workers=case.workers,
        persistent_workers=case.persistent,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    evaluation = DataLoader(data, batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    evaluation = accelerator.prepare(evaluation)
    losses: list[float] = []
    watch.follow(lambda: {
        "model": accelerator.unwrap_model(model), "optimizer": optimizer,
        "scheduler": scheduler.scheduler, "step": accelerator.step,
    })  # fmt: skip

    def evaluate() -> None:
        with torch.no_grad():
            losses.extend(float(model(**batch)["loss"]) for batch in evaluation)

    ckpt, first, skip, done = None, 0, 0, 0
    folder = os.path.join(watch.folder, "own")
    if how == "protected":
        import autockpt.integrations.accelerate as protection

        ckpt = protection.attach(accelerator)
        first = ckpt.epoch
        done = ckpt.step_count
    saved = sorted(glob.glob(f"{folder}/s*"), key=lambda path: int(path.rsplit("-", 1)[1]))
    if how == "own" and saved:
        accelerator.load_state(saved[-1])
        batches = int(saved[-1].rsplit("-", 1)[1])
        first, skip = divmod(batches, len(loader))
    for epoch in range(first, EPOCHS):
        batches = epoch * len(loader) + skip
        left = skip_first_batches(loader, skip) if skip else loader
        behind, skip = skip if ckpt is None else ckpt.first_batch, 0
        for number, batch in enumerate(left, behind):
            if number == 4 and case.option.endswith("left early"):
                break
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            batches += 1
            if accelerator.sync_gradients:
                done += 1
                if case.evaluate_every and done % case.evaluate_every == 0:
                    evaluate()
            if ckpt is not None:
                ckpt.step()
            if how == "own" and batches % OWN_EVERY == 0:
                accelerator.save_state(f"{folder}/s-{batches}")
        torch.rand(1)  # what a script does at the end of an epoch
    if ckpt is not None:
        ckpt.close()
    watch.end()


if __name__ == "__main__":
    run(train)
