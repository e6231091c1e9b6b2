"""A fit as users write it; MODE=protected adds the callback."""

import warnings
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from tests.frameworks import small
from tests.frameworks.small import option


class Module(L.LightningModule):
    """OPTIMIZATION=manual steps by itself, PLATEAU=1 follows the mean loss of an epoch.

    UNFREEZE=1 trains a backbone too, from the second epoch on.  AVERAGE=norm averages weights, and
    adds an epoch for the statistics of the norm; with AVERAGE=1 there is no norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = small.net()
        self.noise = torch.Generator().manual_seed(7)
        self.mean = torchmetrics.MeanMetric()
        self.automatic_optimization = option("OPTIMIZATION") != "manual"
        self.backbone = torch.nn.Linear(8, 8) if option("UNFREEZE") else torch.nn.Identity()
        if option("AVERAGE") == "norm":
            self.backbone = torch.nn.BatchNorm1d(8)

    @property
    def batch(self) -> int:
        """Number of the batch under way, over all epochs."""
        return int(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready)

    def on_train_epoch_start(self) -> None:
        """Hooks may draw before the first batch is fetched."""
        torch.rand(3)
        torch.rand(3, generator=self.noise)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """Notes the samples."""
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        ids, values = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        small.note(f"batch {self.batch}", self.current_epoch, self.global_step, ids.tolist())
        small.place("forward", self.batch)
        values = self.backbone(values + torch.rand((), generator=self.noise))
        loss = self.net(values).square().mean()
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if not self.automatic_optimization:
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step()
        return loss

    def on_after_backward(self) -> None:
        """Gradients are there, and no step was made."""
        small.place("backward", self.batch)

    def on_train_epoch_end(self) -> None:
        """The edge of an epoch."""
        small.place("epoch", self.current_epoch)

    def validation_step(self, batch: Any, number: int) -> None:
        """Draws, and is logged."""
        _, values = batch
        self.log("val", self.net(values + torch.rand_like(values)).square().mean())

    def configure_optimizers(self) -> Any:
        """Schedulers by step, or by what was logged."""
        if option("UNFREEZE"):
            return torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if option("PLATEAU"):
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=0.5
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"},
            }
        if option("AVERAGE"):
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]


class Kills(L.Callback):
    """At the end of a batch, which is not yet the end of its iteration."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Called before validation."""
        small.place("batch", module.batch)


class Notes(DummyLogger):
    """What loggers are told, and under which step."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """One line each."""
        small.note(f"log {step} {sorted(metrics)}", metrics)


def main() -> None:
    """Three epochs of ten batches."""
    warnings.simplefilter("ignore")
    L.seed_everything(1)
    ranks, workers = int(option("RANKS", "1")), int(option("WORKERS", "0"))

    def loader(count: int) -> Any:
        return DataLoader(
            small.Samples(count * ranks), batch_size=4, shuffle=True, num_workers=workers,
            persistent_workers=workers > 0,
        )  # fmt: skip

    data: Any = loader(40)
    if option("COMBINED"):
        data = CombinedLoader({"a": loader(40), "b": loader(20)}, option("COMBINED"))
    callbacks: list[Any] = [Kills()]
    if option("SCHEDULE"):  # of the accumulation, by epoch
        callbacks.append(GradientAccumulationScheduler({0: 1, 1: 3}))
    if option("UNFREEZE"):
        callbacks.append(BackboneFinetuning(unfreeze_backbone_at_epoch=1))
    if option("AVERAGE"):
        callbacks.append(StochasticWeightAveraging(5e-3, swa_epoch_start=2, annealing_epochs=3))
    if option("MODE") == "protected":
        from autockpt.integrations.lightning import Autockpt

        callbacks.append(Autockpt(**small.plan()))
    trainer = L.Trainer(
        max_epochs=3, max_steps=int(option("STEPS", "-1")), accelerator="cpu", devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        callbacks=callbacks, logger=Notes(), log_every_n_steps=3, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
        accumulate_grad_batches=int(option("ACCUMULATE", "1")),
        val_check_interval=float(option("VALIDATE", "1.0")),
        gradient_clip_val=None if option("OPTIMIZATION") else 1.0,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, data, DataLoader(small.Samples(8), batch_size=4))
    small.digest(
        model=module.state_dict(),
        optimizer=trainer.optimizers[0].state_dict(),
        scheduler=[one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        loops=trainer.fit_loop.epoch_loop.state_dict(),
        steps=[trainer.global_step, trainer.current_epoch],
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
    )


if __name__ == "__main__":
    main()
