"""ckpt.report: values of a state, stored with its checkpoint, compared by `keep.best`."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autockpt.cli.app import run as main
from autockpt.executors.storage.catalogue import list_generations
from autockpt.values.errors import ConfigError
from tests.support import trainings


@pytest.mark.usefixtures("attach")
def test_values_belong_to_the_next_durable_checkpoint(
    new_run: Callable[..., str], attach: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every second step here; what is not finite is left out; `ls` and `pin` know them."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=2))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ckpt = attach(model=model, optimizer=optimizer, run_dir=run_dir)
    for step in ckpt.steps(6):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).sum()
        loss.backward()
        optimizer.step()
        if step < 4:
            ckpt.report(loss=torch.tensor(float(step)), bad=float("nan"))
        ckpt.wait_durable(60.0)
    with pytest.raises(ConfigError, match=r"report\(loss=...\): expected a number"):
        ckpt.report(loss="low")
    ckpt.close()
    found = {one.step: dict(one.metrics) for one in list_generations(f"{run_dir}/checkpoints")}
    # Which steps are durable depends on the machine; each has the value of its own iteration.
    valued = {step: values for step, values in found.items() if step <= 4}
    assert valued == {step: {"loss": step - 1.0} for step in valued}
    if not valued:
        pytest.skip("the machine was too busy for a durable checkpoint before the last one")

    kept = max(valued)
    name = next(n for n in os.listdir(f"{run_dir}/checkpoints") if n.endswith(f"{kept:08d}"))
    assert main(["pin", run_dir, "paper", "--generation", name]) == 0
    capsys.readouterr()
    assert main(["ls", run_dir]) == 0
    assert f"pinned as paper; loss {found[kept]['loss']:.0f}" in capsys.readouterr().out
    assert main(["show", run_dir, "paper", "--json"]) == 0
    assert name in json.dumps(json.loads(capsys.readouterr().out))
    assert main(["pin", run_dir, "paper", "--remove"]) == 0


def test_values_of_a_dropped_checkpoint_go_to_the_next(
    new_run: Callable[..., str], attach: Callable[..., Any]
) -> None:
    """Unless the script has said a newer one meanwhile."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=1))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ckpt = attach(model=model, optimizer=optimizer, run_dir=run_dir)
    link, dropped, wanted = ckpt._client, 0, {}
    for step in ckpt.steps(200):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        if step and not dropped:
            ckpt.report(loss=float(step), kept=1.0)
        elif dropped == step:
            ckpt.report(loss=7.5)
        elif dropped:
            break
        ckpt.step()
        if step == 0:
            assert link.wait_until(lambda: bool(link.slots), 60)
        elif not dropped:
            save = link.saves.newest_on_disk
            if save is not None and save.step == ckpt.step_count:
                link.withdraw(save, "the test")
                assert link.wait_until(lambda save=save: link.saves.is_over(save.generation), 60)
                dropped = ckpt.step_count if save.reason is not None else 0
        else:
            assert ckpt.wait_durable(60)
            wanted = {ckpt.step_count: {"loss": 7.5, "kept": 1.0}}
    ckpt.close()
    found = {one.step: dict(one.metrics) for one in list_generations(f"{run_dir}/checkpoints")}
    assert dropped
    assert dropped not in found
    assert {step: found.get(step) for step in wanted} == wanted
