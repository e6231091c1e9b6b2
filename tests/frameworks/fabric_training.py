"""A loop with Fabric as users write it; MODE=protected attaches."""

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from tests.frameworks import small
from tests.frameworks.small import option


def main() -> None:
    """Three epochs of ten batches."""
    ranks, workers = int(option("RANKS", "1")), int(option("WORKERS", "0"))
    fabric = L.Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(1)
    net = small.net()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(net, inner)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 40)
    samples = small.Samples(40 * ranks)
    loader: Any = fabric.setup_dataloaders(
        DataLoader(samples, batch_size=4, shuffle=True, num_workers=workers)
    )
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batch": 0}
    first, ckpt = 0, None
    if option("MODE") == "protected":
        from autockpt.integrations.lightning import attach

        ckpt = attach(fabric, state)
        loader = ckpt.loader(loader)
        first = loader.epoch
    for epoch in range(first, 3):
        begins = loader.first_batch if ckpt is not None else 0
        for number, (ids, values) in enumerate(loader, begins):
            if number == int(option("LEAVE", "10")):
                break
            state["batch"] += 1
            batch = state["batch"]
            small.note(f"batch {batch}", epoch, number, ids.tolist())
            fabric.backward(model(values).square().mean())
            small.place("backward", batch)
            if batch % int(option("ACCUMULATE", "1")) == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            small.place("batch", batch)
            if ckpt is not None:
                ckpt.step()
        torch.rand(3)
        small.place("epoch", epoch)
    if ckpt is not None:
        ckpt.close()
    small.digest(
        model=net.state_dict(), optimizer=inner.state_dict(), scheduler=scheduler.state_dict(),
        batch=state["batch"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
