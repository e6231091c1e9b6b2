"""A fit of Lightning's Trainer over the samples of the contract."""

import os
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
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


class Module(L.LightningModule):
    """The model of the contract."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.model = Model(watch)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """Logged too."""
        loss: torch.Tensor = self.model(**batch)["loss"]
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        """Logged too."""
        self.log("val", self.model(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        """A scheduler by step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]


def train(case: Case, watch: Watch, how: str) -> None:
    """As its documentation shows."""
    warnings.simplefilter("ignore")
    folder = os.path.join(watch.folder, "own")
    callbacks: list[Any] = []
    if how == "protected":
        from autockpt.integrations.lightning import Autockpt

        callbacks.append(Autockpt())
    if how == "own":
        callbacks.append(
            ModelCheckpoint(folder, save_last=True, every_n_train_steps=OWN_EVERY, save_top_k=1)
        )
    every = case.evaluate_every * case.accumulation
    trainer = L.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=case.ranks, callbacks=callbacks, logger=False,
        strategy="ddp" if case.ranks > 1 else "auto", enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=how == "own",
        accumulate_grad_batches=case.accumulation, gradient_clip_val=1.0, num_sanity_val_steps=0,
        val_check_interval=every or None, check_val_every_n_epoch=None if every else 1,
        limit_val_batches=None if every else 0,
    )  # fmt: skip
    seed()
    data = Samples(case)
    module = Module(watch)
    loader = DataLoader(
        data, batch_size=BATCH, shuffle=True, num_workers=case.workers,
        persistent_workers=case.persistent,
    )  # fmt: skip
    watch.follow(lambda: {
        "model": module, "optimizer": trainer.optimizers[0],
        "scheduler": trainer.lr_scheduler_configs[0].scheduler,
        "counters": [trainer.global_step, trainer.current_epoch],
    })  # fmt: skip
    last = os.path.join(folder, "last.ckpt")
    resume = last if how == "own" and os.path.exists(last) else None
    trainer.fit(module, loader, DataLoader(data, batch_size=BATCH), ckpt_path=resume)
    watch.end()


if __name__ == "__main__":
    run(train)
