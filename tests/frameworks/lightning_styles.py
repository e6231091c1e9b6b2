"""Lightning as other people write it; STYLE says which, MODE=protected adds the line.

`loaders` validates on two data sets, stops early and keeps the best files; `gan` steps two
optimizers by hand, one of them every second batch; `manual` is a loop with Fabric.
"""

import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from tests.frameworks import small
from tests.frameworks.small import option


class Notes(DummyLogger):
    """What loggers are told, and under which step."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """One line each."""
        small.note(f"log {step} {sorted(metrics)}", metrics)


class Validated(L.LightningModule):
    """Two validation sets; the first decides about the end and the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = small.net()
        self.outputs: list[torch.Tensor] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """Notes the samples."""
        ids, values = batch
        count = int(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        small.note(f"batch {count}", self.current_epoch, ids.tolist())
        small.place("forward", count)
        loss = self.net(values).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Before a validation."""
        small.place("batch", int(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready))

    def validation_step(self, batch: Any, number: int, dataloader_idx: int = 0) -> None:
        """Of one of two sets."""
        error = (self.net(batch[1]) - torch.rand(())).square().mean()
        self.outputs.append(error)
        self.log("error", error, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        """Whatever the steps kept."""
        self.log("worst", torch.stack(self.outputs).max())
        self.outputs.clear()
        small.place("validated", self.current_epoch)

    def configure_optimizers(self) -> Any:
        """By group, with a plateau."""
        groups = [{"params": [one], "weight_decay": 0.1 * (one.dim() > 1)}
                  for one in self.net.parameters()]  # fmt: skip
        optimizer = torch.optim.NAdam(groups, lr=2e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        name = "error/dataloader_idx_0"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": name}}


class Halves(L.Callback):
    """Lowers a rate by plain attributes; nobody asks it for a state."""

    def __init__(self, every: int) -> None:
        self.every, self.since, self.losses = every, 0, dict[int, float]()

    def on_train_start(self, *_: Any) -> None:
        """Begins."""
        self.since = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Counts."""
        self.since += 1
        self.losses[len(self.losses)] = float(trainer.callback_metrics["loss"])
        if self.since == self.every:
            self.since = 0
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= 0.5 + 0.1 * (sum(self.losses.values()) > 0)


class Tells(Halves):
    """The same with a state."""

    def on_train_start(self, *_: Any) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """All."""
        return {"since": self.since, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """All."""
        self.since, self.losses = state["since"], dict(state["losses"])


class Gan(L.LightningModule):
    """Two optimizers by hand, with gradients clipped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.turns = 0
        self.maker, self.critic = torch.nn.Linear(4, 8), small.net()

    def training_step(self, batch: Any, number: int) -> None:
        """The critic at each batch, the maker at each second."""
        self.turns += 1
        ids, values = batch
        count = int(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        small.note(f"batch {count}", self.current_epoch, ids.tolist())
        first, second = self.optimizers()
        self.toggle_optimizer(second)
        loss = self.critic(self.maker(torch.randn(4, 4))).mean() - self.critic(values).mean()
        second.zero_grad()
        self.manual_backward(loss)
        small.place("backward", count)
        self.clip_gradients(second, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        second.step()
        self.untoggle_optimizer(second)
        small.place("between", count)
        if self.turns % 2 == 0:
            self.toggle_optimizer(first)
            loss = -self.critic(self.maker(torch.randn(4, 4))).mean()
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            self.untoggle_optimizer(first)
        self.log_dict({"loss": loss.detach()})
        small.place("forward", count)

    def on_train_epoch_end(self) -> None:
        """Schedulers by hand."""
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def on_train_batch_end(self, *_: Any) -> None:
        """The end of a batch."""
        small.place("batch", int(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready))

    def configure_optimizers(self) -> Any:
        """One for each."""
        both = [
            torch.optim.Adam(self.maker.parameters(), lr=1e-2, betas=(0.5, 0.9)),
            torch.optim.RMSprop(self.critic.parameters(), lr=1e-2),
        ]
        return both, [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in both]


def fit() -> None:
    """With the Trainer."""
    loader = DataLoader(small.Samples(40), batch_size=4, shuffle=True)
    several = option("STYLE") == "loaders"
    callbacks: list[Any] = [LearningRateMonitor("step")]
    if not several:
        callbacks += [Halves(7), Tells(5)]
    else:
        callbacks += [
            EarlyStopping("error/dataloader_idx_0", patience=3, min_delta=0.01),
            ModelCheckpoint(
                option("NOTES") + "-files", monitor="worst", save_top_k=2, save_last=True
            ),
        ]  # fmt: skip
    if option("MODE") == "protected":
        from autockpt.integrations.lightning import Autockpt

        callbacks.append(Autockpt(**small.plan()))
    trainer = L.Trainer(
        max_epochs=4, accelerator="cpu", callbacks=callbacks, logger=Notes(), log_every_n_steps=2,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=several,
        **({"val_check_interval": 5, "num_sanity_val_steps": 2, "gradient_clip_val": 0.5,
            "gradient_clip_algorithm": "value", "limit_val_batches": 2} if several else {}),
    )  # fmt: skip
    module = Validated() if several else Gan()
    checks = [DataLoader(small.Samples(count), batch_size=4, shuffle=count == 12)
              for count in (8, 12)]  # fmt: skip
    trainer.fit(module, loader, checks if several else None)
    best = [one for one in callbacks if isinstance(one, ModelCheckpoint)]
    small.digest(
        model=module.state_dict(), optimizers=[one.state_dict() for one in trainer.optimizers],
        schedulers=[one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        steps=[trainer.global_step, trainer.current_epoch],
        best=[sorted(float(v) for v in one.best_k_models.values()) for one in best],
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
    )  # fmt: skip


def manual() -> None:
    """Fabric: accumulated by hand, evaluated every few steps, the rate set by the step."""
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(1)
    net, head = small.net(), torch.nn.Linear(8, 8)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    other = torch.optim.Adagrad(head.parameters(), lr=1e-2)
    body, first = fabric.setup(net, inner)
    top, second = fabric.setup(head, other)
    data, held = DataLoader(small.Samples(40), batch_size=4, shuffle=True), small.Samples(8)
    loader: Any = fabric.setup_dataloaders(data)
    state: dict[str, Any] = {
        "body": body, "top": top, "first": first, "second": second, "seen": 0, "best": 1e9,
    }  # fmt: skip
    begins, ckpt = 0, None
    if option("MODE") == "protected":
        from autockpt.integrations.lightning import attach

        ckpt = attach(fabric, state)
        loader = ckpt.loader(loader)
        begins = loader.epoch
    for epoch in range(begins, 3):
        for ids, values in loader:
            state["seen"] += 1
            seen = state["seen"]
            small.note(f"batch {seen}", epoch, ids.tolist())
            with fabric.no_backward_sync(body, enabled=seen % 2 == 1):
                loss = body(top(values)).square().mean() / 2
                fabric.backward(loss)
            small.place("backward", seen)
            if seen % 2 == 0:
                for group in inner.param_groups:
                    group["lr"] = 0.1 * 0.97 ** (seen // 2)
                fabric.clip_gradients(body, first, max_norm=0.5)
                first.step()
                second.step()
                first.zero_grad(set_to_none=True)
                second.zero_grad()
            if seen % 6 == 0:
                body.eval()
                with torch.no_grad():
                    batch = torch.stack([held[n][1] for n in range(8)]) + torch.rand(8)
                    error = float(body(top(batch)).square().mean())
                state["best"] = min(state["best"], error)
                small.note(f"error {seen}", error)
                body.train()
            small.place("batch", seen)
            if ckpt is not None:
                ckpt.step()
        small.place("epoch", epoch)
    if ckpt is not None:
        ckpt.close()
    small.digest(
        body=net.state_dict(), top=head.state_dict(), first=inner.state_dict(),
        second=other.state_dict(), plain=[state["seen"], state["best"]],
    )  # fmt: skip


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    L.seed_everything(1)
    manual() if option("STYLE") == "manual" else fit()
