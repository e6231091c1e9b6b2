"""Models that are trained by calls of their methods: `attach` alone still finds the iterations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import trainings


class Model(torch.nn.Module):
    """Has no forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def loss(self) -> torch.Tensor:
        """Calls two of its parts."""
        return self.head(self.encoder(torch.rand(1))).sum()

    def functional(self) -> torch.Tensor:
        """Calls none."""
        return (self.scale * torch.rand(1)).sum()


def trained(
    attach: Callable[..., Any], run_dir: str, loss: Callable[[Model], torch.Tensor], stop: int
) -> tuple[Any, list[float]]:
    """(session, losses of the steps) of a process that goes away after `stop`."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = attach(model=model, optimizer=optimizer, data="script", run_dir=run_dir)
    start, losses = ckpt.step_count, []
    for step in range(start, stop):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
        if step == start + 2:
            ckpt._client.wait_until(lambda: bool(ckpt._client.slots), 20)
    return ckpt, losses


def test_the_first_part_that_is_called_stands_for_its_model(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """Each iteration counts once, and a resumed one draws what it drew before."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=5, disk=5))
    ckpt, before = trained(attach, run_dir, Model.loss, 8)
    assert ckpt.step_count == 7  # the last one ends with the script
    assert ckpt.wait_durable(60)
    ckpt.close(final_checkpoint=False)
    ckpt, again = trained(attach, run_dir, Model.loss, 8)
    assert ckpt.restored.step == 5
    assert len(again) == 3
    assert again == before[5:]
    ckpt.close()


def test_a_step_ahead_of_the_loop_changes_nothing(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """As of an optimizer whose state is built by a step without gradients: the model is seen."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_dir = trainings.prepare(new_run(), trainings.plan())
    ckpt = attach(model=model, optimizer=optimizer, data="script", run_dir=run_dir)
    calls: list[int] = []
    ckpt._closing.forwards._before = lambda module: calls.append(id(module))
    optimizer.step()
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == 1
    for _ in range(2):
        model(torch.ones(1))
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert calls == []  # the hook of `watch` holds the function that was given
    ckpt.close(final_checkpoint=False)


def test_a_model_of_which_no_part_is_called_is_said(
    attach: Callable[..., Any], new_run: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing shows where its iterations end."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=2, disk=2))
    ckpt, _ = trained(attach, run_dir, Model.functional, 4)
    assert ckpt.step_count == 0
    assert "no call of an attached model in training mode is seen" in capfd.readouterr().err
    ckpt.close(final_checkpoint=False)
