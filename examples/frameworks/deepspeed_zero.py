"""A loop of DeepSpeed's ZeRO-2 engine under autockpt: a tiny model, and data made here.

    autockpt run --nproc-per-node 2 examples/frameworks/deepspeed_zero.py

Kill a training process while it runs; all ranks go on where they were.  Without a GPU, set
DS_ACCELERATOR=cpu.
"""

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autockpt

EPOCHS = 20
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    """Gradients are accumulated over two batches."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(400, 16))
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    ckpt = autockpt.integrations.deepspeed.protect(engine)
    sampler = DistributedSampler(data)
    loader = ckpt.loader(DataLoader(data, batch_size=8, sampler=sampler))
    for epoch in range(loader.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            batch = batch.to(engine.device)
            loss = (engine(batch) - batch).square().mean()
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(f"epoch {epoch}: step {engine.global_steps}, loss {loss.item():.4f}")
    ckpt.close()


if __name__ == "__main__":
    main()
