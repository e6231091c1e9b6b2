"""Loops with Accelerate as other people write them; STYLE says which, MODE=protected attaches.

`gan` trains two nets in turn, each with an optimizer and clipped gradients; `critic` steps one of
them twice as often.  `average` keeps an average of the weights beside.
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from tests.frameworks import small
from tests.frameworks.small import option


def main() -> None:
    """Three epochs of ten batches."""
    torch.set_num_threads(1)
    small.seed()
    accelerator, style = Accelerator(cpu=True), option("STYLE")
    maker: Any = torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 8)
    )
    critic: Any = small.net()
    first: Any = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.9))
    second: Any = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(first, 2e-2, total_steps=30)
    loader: Any = DataLoader(small.Samples(40), batch_size=4, shuffle=True)
    maker, critic, first, second, loader, schedule = accelerator.prepare(
        maker, critic, first, second, loader, schedule
    )
    mean = torch.optim.swa_utils.AveragedModel(accelerator.unwrap_model(maker))
    if style == "average":
        accelerator.register_for_checkpointing(mean)
    fixed = torch.randn(4, 4)
    ckpt, begins, batch = None, 0, 0
    if option("MODE") == "protected":
        from autockpt.integrations import accelerate

        ckpt = accelerate.attach(accelerator)
        begins, batch = ckpt.epoch, ckpt.step_count
    for epoch in range(begins, 3):
        maker.train()
        behind = ckpt.first_batch if ckpt is not None else 0
        for number, (ids, real) in enumerate(loader, behind):
            if number == 8 and style == "average":
                break
            batch += 1
            small.note(f"batch {batch}", epoch, number, ids.tolist())
            for _ in range(2 if style == "critic" else 1):
                fake = maker(torch.randn(4, 4)).detach()
                loss = critic(fake).mean() - critic(real).mean() + torch.rand(()) / 10
                second.zero_grad()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(critic.parameters(), 0.5)
                second.step()
            small.place("between", batch)
            first.zero_grad()
            loss = -critic(maker(torch.randn(4, 4))).mean()
            accelerator.backward(loss)
            small.place("backward", batch)
            accelerator.clip_grad_value_(maker.parameters(), 0.1)
            first.step()
            schedule.step()
            mean.update_parameters(accelerator.unwrap_model(maker))
            small.note(f"loss {batch}", float(loss))
            small.place("batch", batch)
            if ckpt is not None:
                ckpt.step()
        maker.eval()
        with torch.no_grad():
            small.note(f"shown {epoch}", float(maker(fixed).sum()) + float(torch.rand(())))
        small.place("epoch", epoch)
    if ckpt is not None:
        ckpt.close()
    small.digest(
        maker=accelerator.unwrap_model(maker).state_dict(), first=first.optimizer.state_dict(),
        critic=accelerator.unwrap_model(critic).state_dict(), second=second.optimizer.state_dict(),
        schedule=schedule.scheduler.state_dict(),
        mean=mean.state_dict() if style == "average" else None,
    )  # fmt: skip


if __name__ == "__main__":
    main()
