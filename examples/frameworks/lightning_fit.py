"""A fit of Lightning with one callback; downloads nothing.

    autockpt run examples/frameworks/lightning_fit.py --die-at 25

The process ends itself once, in the middle of an epoch, and is started again where it was.
"""

import argparse
import os
import signal
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from autockpt.integrations.lightning import Autockpt


class Regression(L.LightningModule):
    """A small net for made-up numbers."""

    def __init__(self, die_at: int, protection: Autockpt) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )
        self.die_at, self.protection = die_at, protection

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """The mean squared error of a batch."""
        values, wanted = batch
        if self.global_step == self.die_at and self.protection.session.restored is None:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = torch.nn.functional.mse_loss(self.net(values), wanted)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Two epochs of twenty batches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--die-at", type=int, default=-1, help="step at which to end once")
    options = parser.parse_args()
    L.seed_everything(1)
    values = torch.randn(320, 8)
    loader = DataLoader(TensorDataset(values, values.sum(1, keepdim=True)), 16, shuffle=True)
    protection = Autockpt()
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        callbacks=[protection],
    )  # fmt: skip
    trainer.fit(Regression(options.die_at, protection), loader)
    print(f"step {trainer.global_step}, loss {trainer.callback_metrics['loss_epoch']:.6f}")


if __name__ == "__main__":
    main()
