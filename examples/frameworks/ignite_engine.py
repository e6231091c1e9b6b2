"""An engine of Ignite under autockpt: a tiny model, and data made here.

    autockpt run examples/frameworks/ignite_engine.py

Kill the training process while it runs; it goes on where it was.
"""

import torch
from ignite.engine import Engine, Events
from ignite.handlers import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autockpt.integrations.ignite

EPOCHS = 20


def main() -> None:
    """A handler with a state of its own, the patience of `EarlyStopping`, is attached by name."""
    torch.manual_seed(0)
    inputs = torch.randn(400, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    loader = DataLoader(TensorDataset(inputs), batch_size=8, shuffle=True)

    def iteration(engine: Engine, batch: list[torch.Tensor]) -> float:
        model.train()
        optimizer.zero_grad()
        loss = (model(batch[0]) - batch[0]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(iteration)
    patience = EarlyStopping(3, lambda engine: -engine.state.output, trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: scheduler.step())
    trainer.add_event_handler(Events.EPOCH_COMPLETED, patience)
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED,
        lambda engine: print(f"epoch {engine.state.epoch}: loss {engine.state.output:.4f}"),
    )
    ckpt = autockpt.integrations.ignite.attach(
        trainer, model=model, optimizer=optimizer, scheduler=scheduler, patience=patience
    )
    trainer.run(ckpt.loader(loader), max_epochs=EPOCHS)
    ckpt.close()


if __name__ == "__main__":
    main()
