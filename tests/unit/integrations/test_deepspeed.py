"""Where an engine's iterations end, and what is put back into it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autockpt.integrations import deepspeed
from autockpt.values.errors import ConfigError
from tests.unit.integrations.noted_attach import note_attach


class Engine:
    """The attributes of DeepSpeed's engine that the adapter reads."""

    def __init__(self, *, accumulation: int = 1, optimizer: Any = None) -> None:
        self.module = torch.nn.Linear(2, 2)
        self.optimizer = optimizer or torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.lr_scheduler = None
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._accumulation = accumulation

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._accumulation

    def train_batch_size(self) -> int:
        """Samples of a step."""
        return 4 * self._accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Asked before and within `step`."""
        return (self.micro_steps + 1) % self._accumulation == 0

    def backward(self, loss: torch.Tensor) -> None:
        """As DeepSpeed's."""

    def step(self) -> None:
        """Counts as DeepSpeed does."""
        if self.is_gradient_accumulation_boundary():
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
        self.micro_steps += 1


def test_an_iteration_ends_when_the_next_batch_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An evaluation behind the step belongs to it; micro-batches before the step do too."""
    (made, engine) = note_attach(monkeypatch), Engine(accumulation=2)
    ckpt = deepspeed.protect(engine)
    counts = []
    for _ in ckpt.loader([1, 2, 3, 4]):
        engine.step()
        counts.append(made[0].step_count)
    assert counts == [0, 0, 1, 1]
    assert made[0].step_count == 2
    assert [extra["counters"]["micro_steps"] for extra in made[0].extras] == [2, 4]
    ckpt.close()
    assert made[0].calls.count("step") == 2


def test_a_loop_that_is_left_ends_its_last_iteration_at_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`break` behind the last step."""
    made, engine = note_attach(monkeypatch), Engine()
    ckpt = deepspeed.protect(engine)
    for _ in ckpt.loader([1, 2, 3]):
        engine.step()
        break
    ckpt.close()
    assert made[0].calls[-2:] == ["step", "close"]
    engine.step()
    assert made[0].step_count == 1


def test_a_pass_that_was_left_ends_before_the_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a restart would go on in an epoch that the script has left."""
    made, engine = note_attach(monkeypatch), Engine()
    ckpt = deepspeed.protect(engine)
    loader = ckpt.loader([1, 2, 3])
    for _ in range(2):
        for _ in loader:
            engine.step()
            break
    ckpt.close()
    assert [one for one in made[0].calls if one in ("step", "end_left_epoch")] == [
        "end_left_epoch", "end_left_epoch", "step", "step"
    ]  # fmt: skip


def test_without_a_loader_the_step_is_the_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says what comes behind it."""
    made, engine = note_attach(monkeypatch), Engine()
    ckpt = deepspeed.protect(engine)
    engine.step()
    assert made[0].step_count == 1
    ckpt.close()


def test_a_resume_that_nothing_places_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In front of the first forward, not behind it."""
    note_attach(monkeypatch, step=3)
    engine = Engine()
    ckpt = deepspeed.protect(engine)
    with pytest.raises(ConfigError, match=r"resumed at step 3.*ckpt\.loader"):
        engine.module(torch.zeros(1, 2))
    ckpt.close()
    engine = Engine()
    ckpt = deepspeed.protect(engine)
    assert ckpt.step_count == 3
    engine.module(torch.zeros(1, 2))
    ckpt.close()


def test_counters_and_loss_scale_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an accumulation changed since, `micro_steps` is that of the boundary."""
    made = note_attach(monkeypatch)
    zero = SimpleNamespace(
        optimizer=None, single_partition_of_fp32_groups=[],
        loss_scaler=SimpleNamespace(cur_scale=65536.0, cur_iter=7, dtype=torch.float16),
    )  # fmt: skip
    engine = Engine(accumulation=2, optimizer=zero)
    ckpt = deepspeed.protect(engine)
    engine.step(), engine.step()
    ckpt.close()
    (extra,) = made[0].extras
    assert extra["loss_scaler"] == {"cur_scale": 65536.0, "cur_iter": 7}
    zero.loss_scaler.cur_scale, zero.loss_scaler.cur_iter = 2.0, 0
    note_attach(monkeypatch, step=1, extra=extra)
    resumed = Engine(accumulation=4, optimizer=zero)
    deepspeed.protect(resumed).close()
    assert (resumed.global_steps, resumed.global_samples, resumed.micro_steps) == (1, 8, 4)
    assert (zero.loss_scaler.cur_scale, zero.loss_scaler.cur_iter) == (65536.0, 7)


def test_a_checkpoint_without_counters_gives_them_by_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was imported, or made by `attach` alone."""
    note_attach(monkeypatch, step=5)
    engine = Engine(accumulation=2)
    deepspeed.protect(engine).close()
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (5, 40, 10)


def test_once_stopped_the_loader_gives_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks end at one boundary."""
    made, engine = note_attach(monkeypatch), Engine()
    ckpt = deepspeed.protect(engine)
    seen = []
    for batch in ckpt.loader([1, 2, 3]):
        seen.append(batch)
        engine.step()
        made[0].stopped = True
    assert seen == [1]
    ckpt.close()


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (torch.nn.Linear(2, 2), r"got a Linear; expected the engine of deepspeed\.initialize"),
        (Engine(optimizer=SimpleNamespace()), r"stage to 1"),
    ],
)
def test_what_cannot_be_saved_is_refused(engine: Any, said: str) -> None:
    """At once, by name."""
    with pytest.raises(ConfigError, match=said):
        deepspeed.protect(engine)
