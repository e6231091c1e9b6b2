"""What adapters build on: an owned boundary, a restore in two phases, counters, a loader."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import autockpt
from autockpt.values.errors import ConfigError
from tests.support import trainings

DATA = torch.arange(20.0).view(20, 1)


class Framework:
    """Two epochs of five batches; every sample draws; the optimizer steps twice an iteration.

    Half of the noise comes from a generator of its own.
    """

    def __init__(self, attach: Callable[..., Any] | None, run_dir: str) -> None:
        torch.manual_seed(1)
        self.noise = torch.Generator().manual_seed(2)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        loader: Any = DataLoader(DATA, batch_size=4, shuffle=True)  # type: ignore[arg-type]
        self.epoch, self.ckpt, self.seen = 0, None, list[Any]()
        if attach is not None:
            self.ckpt = attach(
                model=self.model, optimizer=self.optimizer, run_dir=run_dir, restore="tensors",
                extra=lambda: {"epoch": self.epoch},
            )  # fmt: skip
            loader = self.ckpt.loader(loader)
            self.epoch = self.ckpt.restored.extra["epoch"] if self.ckpt.restored else 0
            torch.rand(3)  # a framework draws before it trains, on a resume once more
            if not self.ckpt.restored:
                torch.manual_seed(1)
            self.ckpt.own_boundary(10)
        self.loader = loader
        if attach is None:
            torch.manual_seed(1)

    def train(self, until: int = 10) -> None:
        """Forwards, steps and evaluation between two boundaries are one iteration."""
        for epoch in range(self.epoch, 2):
            self.epoch = epoch
            for batch in self.loader:
                self.seen.append(batch.flatten().tolist())
                for _ in range(2):
                    self.optimizer.zero_grad()
                    noise = torch.rand(()) + torch.rand((), generator=self.noise)
                    self.model(batch + noise).square().mean().backward()
                    self.optimizer.step()
                self.model(batch)  # an evaluation in training mode
                if self.ckpt is not None and boundary(self.ckpt, until):
                    return


def boundary(ckpt: Any, until: int) -> bool:
    """Ends an iteration; that of `until` is durable then."""
    ckpt.step()
    assert ckpt._client.wait_until(lambda: ckpt.ready, 60)
    if ckpt.step_count == until - 1:
        ckpt.save()
    return bool(ckpt.step_count == until and ckpt.wait_durable(60))


@pytest.fixture
def run_dir(new_run: Callable[..., str]) -> str:
    """Saves where the test asks for it."""
    return trainings.prepare(new_run(), trainings.plan(memory=100, disk=100))


@pytest.mark.parametrize("until", [5, 7])
def test_killed_and_resumed_is_undisturbed(
    attach: Callable[..., Any], run_dir: str, until: int
) -> None:
    """Bytes of the end and samples of every step; within an epoch, and at its last batch."""
    bare = Framework(None, "")
    bare.train()
    assert autockpt.peek(run_dir) is None
    first = Framework(attach, run_dir)
    first.train(until)
    assert first.ckpt.step_count == until == len(first.seen)  # whatever stepped in between
    with pytest.raises(ConfigError, match="there is one of that name"):
        first.ckpt.loader(first.loader)
    first.ckpt.close(final_checkpoint=False)
    second = Framework(attach, run_dir)
    found = autockpt.peek(run_dir)
    assert found is not None
    assert (found.step, found.extra) == (until, {"epoch": until // 6})
    assert second.ckpt.restored.step == until
    second.train()
    second.ckpt.close()
    assert first.seen + second.seen == bare.seen
    for name, value in bare.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])


def test_a_loop_over_epochs_has_read_where_it_begins(
    attach: Callable[..., Any], run_dir: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script of one's own with `ckpt.loader` resumes when it reads the loader's epoch."""

    def begin() -> tuple[Any, Any]:
        model = torch.nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
        ckpt = attach(model=model, optimizer=sgd, run_dir=run_dir)
        loader = ckpt.loader(DataLoader(DATA, batch_size=4))  # type: ignore[arg-type]
        for _ in range(loader.epoch, 2):
            for batch in loader:
                model(batch).mean().backward()
                sgd.step()
                if boundary(ckpt, 7):
                    return ckpt, loader
        return ckpt, loader

    ckpt, _ = begin()
    ckpt.close(final_checkpoint=False)
    ckpt, loader = begin()
    assert (ckpt.step_count, loader.epoch) == (10, 2)
    said = capfd.readouterr().err
    assert "refused" not in said
    assert "are not saved" not in said  # the script's own generators: there is none


def test_counters_that_are_no_json_cost_one_checkpoint(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """A metric of numpy is a number; another object is refused, and the next checkpoint is made."""
    counters: dict[str, Any] = {"loss": np.float32(0.5), "count": torch.tensor(3)}
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=1))
    ckpt = attach(
        model=model, optimizer=optimizer, data="script", run_dir=run_dir, extra=lambda: counters
    )
    for step in ckpt.steps(8):
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        if step == 1:
            assert ckpt._client.wait_until(lambda: bool(ckpt._client.slots), 60)
        counters["odd"] = object() if step == 3 else step
    ckpt.close()
    again = attach(
        model=model, optimizer=optimizer, data="script", run_dir=run_dir, extra=lambda: counters
    )
    assert again.restored.step == 8
    assert again.restored.extra == {"loss": 0.5, "count": 3, "odd": 7}
