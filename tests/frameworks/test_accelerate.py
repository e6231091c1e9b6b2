"""The adapter contract in Accelerate, with the real package."""

from collections.abc import Callable

import pytest

from tests.contracts.adapter_contract import AdapterContract, Framework
from tests.contracts.adapter_process import Case
from tests.frameworks.changed_settings import each_epoch, trained
from tests.frameworks.undisturbed import require_undisturbed

FRAMEWORK = Framework("accelerate", "tests/frameworks/accelerate_driver.py", "accelerate")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(FRAMEWORK.missing), reason=FRAMEWORK.missing),
]


class TestAccelerate(AdapterContract):
    """Killed anywhere, it ends as if nothing had happened."""

    framework = FRAMEWORK
    more = (
        Case(kill="boundary:3", ranks=2, option="split_batches"),
        Case(kill="boundary:3", ranks=2, option="dispatch_batches"),
        Case(kill="boundary:6", ranks=2, option="dispatch_batches, left early"),
        Case(kill="forward:14", option="use_seedable_sampler"),
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"STYLE": "gan", "KILL": "backward13,epoch1"}, id="two optimizers"),
        pytest.param({"STYLE": "critic", "KILL": "between8,batch20"}, id="one steps twice"),
        pytest.param({"STYLE": "average", "KILL": "batch10,backward21"}, id="averaged weights"),
    ],
)
def test_a_killed_loop_of_another_style(
    new_run: Callable[..., str], options: dict[str, str]
) -> None:
    """Both nets, optimizers, losses and samples of every step, random numbers."""
    require_undisturbed("accelerate_styles", new_run(), **options)


def test_a_count_of_batches_is_named(
    new_run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It would begin at 0 in the rest of an epoch."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from autockpt.integrations.accelerate import attach

    accelerator, net = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters()), DataLoader(torch.ones(3, 1))
    )
    ckpt = attach(accelerator, run_dir=new_run())
    for _ in range(ckpt.epoch, 1):
        for i, batch in enumerate(loader):
            accelerator.backward(model(batch).sum() / (i + 1))
            optimizer.step()
            ckpt.step()
    ckpt.close()
    assert "enumerate(loader, ckpt.first_batch)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("style", "batch", "window", "sizes"),
    [
        ("accelerate", 4, 3, [4, 4, 4, 12]),  # batches 3, 4 to 6
        ("accelerate", 1, 5, [4, 4, 2, 5, 5, 4]),
        ("accumulate", 1, 3, [4, 4, 3, 3, 3, 3, 3, 1]),
    ],
)
def test_other_batches_within_an_epoch(
    new_run: Callable[..., str], style: str, batch: int, window: int, sizes: list[int]
) -> None:
    """The last batch of the epoch has its step, and a new window of accumulation is a whole one."""
    run_dir = new_run()
    trained(FRAMEWORK, style, run_dir, batch=2, accumulation=2, stop=2)
    steps, said = trained(FRAMEWORK, style, run_dir, batch=batch, accumulation=window)
    assert [len(step) for step in each_epoch(steps)[0]] == sizes, said
