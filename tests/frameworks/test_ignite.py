"""Engines that are killed end as undisturbed ones do."""

from collections.abc import Callable
from typing import ClassVar

import pytest

from tests.contracts.adapter_contract import BY_MICRO_BATCH, LATER, AdapterContract, Framework
from tests.frameworks.changed_settings import each_epoch, trained
from tests.frameworks.undisturbed import require_undisturbed

pytest.importorskip("ignite", reason="Ignite is not installed: make test-frameworks")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class TestIgnite(AdapterContract):
    """Killed anywhere, it ends as if nothing had happened."""

    framework = Framework("ignite", "tests/frameworks/ignite_driver.py", "ignite")
    not_for: ClassVar[dict[str, str]] = BY_MICRO_BATCH
    more = LATER


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"KILL": "batch13,backward21", "DRAW": "1"}, id="at a step and in backward"),
        pytest.param({"KILL": "batch10,epoch2"}, id="at the edge of an epoch"),
        pytest.param({"KILL": "batch13", "SIGNAL": "SIGTERM"}, id="an announced end"),
    ],
)
def test_a_killed_engine(new_run: Callable[..., str], options: dict[str, str]) -> None:
    """Iteration, epoch and what the script registered; samples of every step."""
    require_undisturbed("ignite_training", new_run(), **options)


@pytest.mark.parametrize(
    ("batch", "window", "sizes"), [(1, 3, [4, 4, 1, *[3] * 5]), (4, 3, [4, 4, 4, 12])]
)
def test_other_batches_within_an_epoch(
    new_run: Callable[..., str], batch: int, window: int, sizes: list[int]
) -> None:
    """Epochs end with the loader's, and all of them are trained."""
    run_dir = new_run()
    trained(TestIgnite.framework, "ignite", run_dir, batch=2, accumulation=2, stop=2)
    steps, said = trained(TestIgnite.framework, "ignite", run_dir, batch=batch, accumulation=window)
    first, second = each_epoch(steps)
    assert [len(step) for step in first] == sizes, said
    assert steps[len(first)] == steps[len(first) + len(second) + 1] == [-1], said


def test_more_epochs_are_trained(new_run: Callable[..., str]) -> None:
    """A run that was over goes on where `max_epochs` is raised."""
    run_dir = new_run()
    trained(TestIgnite.framework, "ignite", run_dir, batch=4, accumulation=1, epochs=1)
    steps, said = trained(TestIgnite.framework, "ignite", run_dir, batch=4, accumulation=1)
    assert len(each_epoch(steps)) == 2, said


@pytest.mark.parametrize("is_first", [True, False])
def test_an_error_that_the_script_handles_ends_no_training(
    new_run: Callable[..., str], is_first: bool
) -> None:
    """As without autockpt; the iteration that failed is no checkpoint's."""
    import torch
    from ignite.engine import Engine, Events

    from autockpt.integrations import ignite

    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def update(engine: Engine, batch: torch.Tensor) -> None:
        if engine.state.iteration == 3:
            raise RuntimeError("no such batch")
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()

    engine, handled = Engine(update), []

    def handle(engine: Engine, error: Exception) -> None:
        handled.append(error)
        engine.terminate()

    if is_first:
        engine.add_event_handler(Events.EXCEPTION_RAISED, handle)
    ckpt = ignite.attach(engine, model=net, optimizer=optimizer, run_dir=new_run())
    if not is_first:
        engine.add_event_handler(Events.EXCEPTION_RAISED, handle)
    loader = torch.utils.data.DataLoader(torch.ones(6, 1))  # type: ignore[arg-type]
    engine.run(ckpt.loader(loader), max_epochs=2)
    assert len(handled) == 1
    assert ckpt.step_count == 2
