"""A loop in Ray Train under autockpt: two workers on this machine, and data made here.

    python examples/frameworks/ray_train.py

Kill one of its workers while it runs (`ps` shows ray::RayTrainWorker): Ray starts both again, and
they go on from memory.
"""

import os
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autockpt

STEPS = 400


def train_loop(config: dict[str, Any]) -> None:
    """In each worker."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(400, 16))
    loader = prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True))
    ckpt = autockpt.integrations.ray.attach(model=model, optimizer=optimizer, data=loader)
    for step, (batch,) in ckpt.batches(STEPS):
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 100 == 0:
            ckpt.report({"step": step + 1, "loss": loss.item()})


def main() -> None:
    """Ray starts the workers again up to three times."""
    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        train_loop,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="autockpt-example", storage_path=os.path.abspath("runs/ray"),
            failure_config=FailureConfig(max_failures=3),
        ),
    )  # fmt: skip
    result = trainer.fit()
    print(result.metrics)
    if result.checkpoint is not None:
        print("durable:", autockpt.integrations.ray.located(result.checkpoint))


if __name__ == "__main__":
    main()
