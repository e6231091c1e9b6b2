"""An Engine as users write it; MODE=protected attaches."""

from typing import Any

import torch
from ignite.engine import Engine, Events
from torch.utils.data import DataLoader

from tests.frameworks import small
from tests.frameworks.small import option


def main() -> None:
    """Three epochs of ten batches."""
    small.seed()
    noise = torch.Generator().manual_seed(7)
    net = small.net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

    def train(engine: Engine, batch: Any) -> None:
        ids, values = batch
        number = engine.state.iteration
        small.note(f"batch {number}", engine.state.epoch, ids.tolist())
        optimizer.zero_grad()
        net(values + torch.rand((), generator=noise)).square().mean().backward()
        small.place("backward", number)
        optimizer.step()
        scheduler.step()

    trainer = Engine(train)
    trainer.state_dict_user_keys.append("seen")
    trainer.state.seen = 0

    @trainer.on(Events.ITERATION_COMPLETED)
    def count(engine: Engine) -> None:
        engine.state.seen += 4
        small.place("batch", engine.state.iteration)

    @trainer.on(Events.EPOCH_COMPLETED)
    def draw(engine: Engine) -> None:
        torch.rand(3)
        small.place("epoch", engine.state.epoch)

    workers = int(option("WORKERS", "0"))
    loader: Any = DataLoader(small.Samples(40), batch_size=4, shuffle=True, num_workers=workers)
    if option("MODE") == "protected":
        from autockpt.integrations import ignite

        ckpt = ignite.attach(trainer, model=net, optimizer=optimizer, scheduler=scheduler)
        loader = ckpt.loader(loader)
    trainer.run(loader, max_epochs=3)
    small.digest(
        model=net.state_dict(), optimizer=optimizer.state_dict(), scheduler=scheduler.state_dict(),
        state=[trainer.state.iteration, trainer.state.epoch, trainer.state.seen],
    )  # fmt: skip


if __name__ == "__main__":
    main()
