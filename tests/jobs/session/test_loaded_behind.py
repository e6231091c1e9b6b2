"""Weights that a script loads behind attach: at each start, over the state that it has resumed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import trainings

Load = Callable[[Any, torch.nn.Module, dict[str, Any]], None]
"""(session, model, weights)."""


def always(ckpt: Any, model: torch.nn.Module, weights: dict[str, Any]) -> None:
    """As with weights that were trained elsewhere."""
    model.load_state_dict(weights)


def at_first(ckpt: Any, model: torch.nn.Module, weights: dict[str, Any]) -> None:
    """Where nothing was restored."""
    if ckpt.restored is None:
        model.load_state_dict(weights)


def by_count(ckpt: Any, model: torch.nn.Module, weights: dict[str, Any]) -> None:
    """The same by the step count."""
    if ckpt.step_count == 0:
        model.load_state_dict(weights)


@pytest.mark.parametrize(("load", "says"), [(always, True), (at_first, False), (by_count, False)])
def test_a_load_behind_attach_is_reported_at_the_first_start_already(
    attach: Callable[..., Any], new_run: Callable[..., str], capfd: pytest.CaptureFixture[str],
    load: Load, says: bool,
) -> None:  # fmt: skip
    """And at a resume as what it is; a load within the training is the training's."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=1))
    weights = torch.nn.Linear(1, 1).state_dict()
    said = []
    for total in (4, 8):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ckpt = attach(model=model, optimizer=optimizer, data="script", run_dir=run_dir)
        load(ckpt, model, weights)
        for step in ckpt.steps(total):
            model(torch.ones(1)).sum().backward()
            optimizer.step()
            if step == total - 1:
                model.load_state_dict(weights)
        said.append(capfd.readouterr().err)
    assert ("is called behind attach: a restart would" in said[0]) is says
    assert ("over the state of step 4 that was resumed" in said[1]) is says


@pytest.mark.parametrize("is_closed", [False, True])
def test_state_that_is_loaded_behind_the_last_iteration_is_said(
    attach: Callable[..., Any],
    new_run: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    is_closed: bool,
) -> None:
    """The best weights, for a test at the end: in the last checkpoint, unless it is made before."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=100, disk=100))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = {name: torch.full_like(one, 7.0) for name, one in model.state_dict().items()}
    ckpt = attach(model=model, optimizer=optimizer, run_dir=run_dir)
    for step in range(6):
        if step == 3:
            model.load_state_dict(best)  # training goes on behind it
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        ckpt.step()
        assert ckpt._client.wait_until(lambda: bool(ckpt._client.slots), 60)
    if is_closed:
        ckpt.close()
    trained = {name: one.clone() for name, one in model.state_dict().items()}
    model.load_state_dict(best)
    ckpt.close()
    said = capsys.readouterr().err
    assert ("behind the last iteration. The last checkpoint (step 6)" in said) != is_closed
    again = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    attach(model=again, optimizer=optimizer, run_dir=run_dir).close(final_checkpoint=False)
    kept = trained if is_closed else best
    assert all(torch.equal(one, kept[name]) for name, one in again.state_dict().items())
