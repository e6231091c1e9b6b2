"""A loop of Accelerate under autockpt: a tiny model, and data made here.

    autockpt run examples/frameworks/accelerate_loop.py

Kill the training process while it runs; it goes on where it was.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autockpt

EPOCHS = 20


def main() -> None:
    """Gradients are accumulated over two batches."""
    torch.manual_seed(0)
    inputs = torch.randn(400, 16)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(inputs), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ckpt = autockpt.integrations.accelerate.attach(accelerator)
    for epoch in range(ckpt.epoch, EPOCHS):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            ckpt.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    ckpt.close()


if __name__ == "__main__":
    main()
