"""A value that cannot be saved any more costs no checkpoint of all else, and nobody is deceived."""

import pathlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autockpt
from autockpt.executors.state.live_state import LiveState
from autockpt.reports.analysis.degradation import lacking
from autockpt.run_directory import RunDirectory
from autockpt.session import base
from autockpt.values.errors import ConfigError
from tests.support import trainings

TOTAL, LEFT = 8, 5


def of_values() -> tuple[Any, Callable[[Any], None]]:
    """A value becomes a path."""
    state = autockpt.TrainState(best=0, best_path=None)
    return state, lambda value: setattr(state, "best_path", value)


def of_attributes() -> tuple[Any, Callable[[Any], None]]:
    """An attribute of the script's object becomes one."""
    trainer = SimpleNamespace(best=0, best_path=None)
    state = autockpt.TrainState.of(trainer, "best", "best_path")
    return state, lambda value: setattr(trainer, "best_path", value)


MAKES = [of_values, of_attributes]


def train(attach: Callable[..., Any], run_dir: str, make: Callable[[], Any], stop: int) -> Any:
    """(saved values that the loop began with, first step) of a training up to `stop`.

    The value is a path from step 3 on where the training is left, and text where it goes on.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, put = make()
    ckpt = attach(model=model, optimizer=optimizer, state=state, run_dir=run_dir)
    began, first = dict(state.state_dict()), ckpt.step_count
    for step in ckpt.steps(TOTAL):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        # A new keeper has none before the first iteration.
        assert step == first or ckpt._client.wait_until(lambda: bool(ckpt._client.slots), 60)
        if step >= 3:
            put(pathlib.Path("best.pt") if stop < TOTAL else "best.pt")
        if step + 1 == stop < TOTAL:
            ckpt.step()
            break
    if stop < TOTAL:
        assert ckpt.wait_durable(60)
        ckpt.close(final_checkpoint=False)
    return began, ckpt.restored


@pytest.mark.parametrize("make", MAKES)
def test_a_value_that_becomes_a_path_is_left_out_alone(
    attach: Callable[..., Any],
    new_run: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], Any],
) -> None:
    """All else is saved, it is said while it lasts, and a restart says so too."""
    monkeypatch.setattr(base, "FIRST_REMINDER_S", 0.0)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=1))
    train(attach, run_dir, make, LEFT)
    said = capsys.readouterr().err
    assert said.count("checkpoints lack state.best_path") >= 2  # a reminder without a pause
    assert re.search(r"a pathlib(\._local)?\.PosixPath cannot be saved", said)
    assert "state.best_path" in lacking(RunDirectory(run_dir).events())
    began, restored = train(attach, run_dir, make, TOTAL)
    assert restored is not None
    assert restored.step >= LEFT - 1
    assert began == {"best": 0, "best_path": None}  # as the script makes it
    said = capsys.readouterr().err
    assert "the checkpoint lacks state.best_path, which could not be saved" in said
    assert "checkpoints lack" not in said  # it is text by now
    assert lacking(RunDirectory(run_dir).events()) == ""


def test_a_value_that_cannot_be_saved_at_first_is_refused() -> None:
    """There it costs nothing to correct it."""
    state = autockpt.TrainState(path=pathlib.Path("best.pt"))
    live = LiveState({}, {}, {"state": state})
    with pytest.raises(ConfigError, match=r"state\.path: a pathlib(\._local)?\.PosixPath cannot"):
        live.dry_encode()


def test_an_attribute_whose_object_has_gone_costs_nothing_else() -> None:
    """The script replaces a part of its trainer by None in the middle of a run."""
    trainer: Any = SimpleNamespace(step=3, stopper=SimpleNamespace(best=0.5))
    live = LiveState({}, {}, {"state": autockpt.TrainState.of(trainer, "step", "stopper.best")})
    assert live.extra({})[0]["others"]["state"] == {"step": 3, "stopper.best": 0.5}
    trainer.stopper = None
    skeleton, _ = live.extra({})
    assert skeleton["others"]["state"] == {"step": 3}
    assert skeleton["progress"]["left_out"] == list(live.left_out) == ["state.stopper.best"]
    trainer.stopper = SimpleNamespace(best=0.7)
    assert "left_out" not in live.extra({})[0]["progress"]
    assert not live.left_out
