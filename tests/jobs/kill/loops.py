"""A training whose state is large and whose steps are short, driven step by step by a test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support import trainings

PATIENCE_S = 60.0


class Large(nn.Module):
    """A linear layer that is trained, beside `nbytes` of random numbers that are only saved."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.small = nn.Linear(4, 4)
        self.large = nn.Parameter(torch.randn(nbytes // 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 4] in and out."""
        return self.small(x)


class Loop:
    """The loop; `more` goes to attach."""

    def __init__(self, attach: Callable[..., Any], run_dir: str, nbytes: int, **more: Any) -> None:
        torch.set_num_threads(1)
        self.model = Large(nbytes)
        self.optimizer = torch.optim.SGD(self.model.small.parameters(), lr=0.1, momentum=0.9)
        self.run_dir = Path(run_dir)
        self.ckpt = attach(model=self.model, optimizer=self.optimizer, run_dir=run_dir, **more)

    def train(self) -> None:
        """Forward, backward, step."""
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm_up(self) -> None:
        """One step: from then on there are slots."""
        self.train()
        self.ckpt.step()
        assert self.ckpt._client.wait_until(lambda: bool(self.ckpt._client.slots), PATIENCE_S)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Telemetry of this rank and its keeper, file by file."""
        found = []
        for path in sorted((self.run_dir / "telemetry").glob("*.jsonl")):
            for line in path.read_text().splitlines():
                event = json.loads(line)
                if event["event"] == kind:
                    found.append(event)
        return found

    def durable(self) -> None:
        """Waits until the checkpoint that was begun last is durable."""
        self.ckpt.wait_for_staging()
        assert self.ckpt._client.wait_until(lambda: not self.ckpt._saver.is_busy(), PATIENCE_S)


def prepared(new_run: Callable[..., str], **choices: Any) -> str:
    """A run directory whose plan saves every other step, with these choices of staging."""
    return trainings.prepare(new_run(), trainings.plan(memory=2, disk=2, **choices))
