"""A script that changes its structure in training is resumed where it builds it again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

from autockpt.values.errors import ConfigError

AT = 3
"""The step before which the structure changes."""


class Job:
    """A model whose forward draws, and an optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 6)
        )
        self.optimizer = torch.optim.AdamW(self.model[2].parameters(), lr=0.05)

    def step(self, change: Callable[["Job"], None] | None, step: int) -> None:
        """The change is made where it is not made yet; then inputs are drawn."""
        if change is not None and step >= AT:
            change(self)
        loss = self.model(torch.randn(8, 4)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def ended(self) -> list[torch.Tensor]:
        """Parameters, buffers and the next random number."""
        every = [*self.model.parameters(), *self.model.buffers(), torch.rand(1)]
        return [tensor.detach().clone() for tensor in every]


def unfreeze(job: Job) -> None:
    """A group of parameters that were there."""
    if len(job.optimizer.param_groups) == 1:
        job.optimizer.add_param_group({"params": [*job.model[0].parameters()], "lr": 0.01})


def grow(job: Job) -> None:
    """A new module, whose values are drawn, and a group for it."""
    if len(job.model) == 3:
        job.model.append(torch.nn.Linear(6, 2))
        job.optimizer.add_param_group({"params": [*job.model[3].parameters()]})


def prune_half(job: Job) -> None:
    """Parameters change their names, and masks come."""
    if not prune.is_pruned(job.model[2]):
        prune.l1_unstructured(job.model[2], "weight", amount=0.5)


def track_a_mean(job: Job) -> None:
    """A buffer that comes within the next forward, which uses it at once."""

    def track(module: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        if not hasattr(module, "mean"):
            module.register_buffer("mean", given[0].detach().mean(0))
        module.mean.mul_(0.9).add_(given[0].detach().mean(0), alpha=0.1)
        return (given[0] - module.mean,)

    if not job.model[2]._forward_pre_hooks:
        job.model[2].register_forward_pre_hook(track)


CHANGES = {
    "a group": unfreeze, "a module": grow, "pruning": prune_half, "a buffer": track_a_mean
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_the_state_is_put_back_when_the_structure_appears(
    attach: Callable[..., Any],
    new_run: Callable[..., str],
    name: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Eight steps in two lives end in the bits of eight in one; the change is said."""
    whole, run_dir = Job(), new_run()
    for step in range(8):
        whole.step(CHANGES[name], step)
    expected = whole.ended()
    for total in (5, 8):
        job = Job()
        ckpt = attach(model=job.model, optimizer=job.optimizer, run_dir=run_dir)
        assert ckpt.step_count == (0 if total == 5 else 5)
        for step in ckpt.steps(total):
            job.step(CHANGES[name], step)
    assert all(map(torch.equal, job.ended(), expected))
    told = capfd.readouterr().err
    assert "the structure of the state changed before step" in told
    assert "is built again, and its state is put back" in told
    if name == "a module":
        job = Job()
        ckpt = attach(model=job.model, optimizer=job.optimizer, run_dir=run_dir)
        assert ckpt.step_count == 8
        with pytest.raises(ConfigError, match=r"not built before the first step: model\.3\.bias"):
            job.step(None, 0)
        assert "add_param_group" not in vars(job.optimizer)
