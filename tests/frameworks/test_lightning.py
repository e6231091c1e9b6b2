"""Fits and Fabric loops that are killed end as undisturbed ones of bare Lightning do."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from tests.contracts.adapter_contract import BY_MICRO_BATCH, LATER, AdapterContract, Framework
from tests.frameworks.changed_settings import each_epoch, trained
from tests.frameworks.undisturbed import require_undisturbed

pytest.importorskip("lightning", reason="Lightning is not installed: make test-frameworks")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class TestLightning(AdapterContract):
    """Killed anywhere, a fit ends as if nothing had happened."""

    framework = Framework("lightning", "tests/frameworks/lightning_driver.py", "lightning")


class TestFabric(AdapterContract):
    """Killed anywhere, a loop of Fabric ends as if nothing had happened."""

    framework = Framework("lightning", "tests/frameworks/fabric_driver.py", "lightning")
    not_for: ClassVar[dict[str, str]] = BY_MICRO_BATCH
    more = LATER


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"KILL": "batch17,backward24", "DRAW": "1"}, id="at a step and in backward"),
        pytest.param({"KILL": "forward9,epoch1", "VALIDATE": "0.3"}, id="validation mid-epoch"),
        pytest.param({"KILL": "batch11,forward21"}, id="at the edge of an epoch"),
        pytest.param(
            {"KILL": "backward12,batch20", "ACCUMULATE": "3", "VALIDATE": "0.5"}, id="accumulation"
        ),
        pytest.param(
            {"KILL": "backward14,forward21", "OPTIMIZATION": "manual", "VALIDATE": "0.25"},
            id="manual optimization",
        ),
        pytest.param({"KILL": "batch13,forward11", "PLATEAU": "1"}, id="a scheduler of the log"),
        pytest.param(
            {"KILL": "batch13,forward24", "PLATEAU": "1", "VALIDATE": "0.3", "STEPS": "27"},
            id="a number of steps",
        ),
        pytest.param({"KILL": "batch13,forward21", "COMBINED": "max_size_cycle"}, id="two loaders"),
        pytest.param({"KILL": "batch13,forward21", "WORKERS": "2"}, id="workers that persist"),
        pytest.param({"KILL": "batch17,forward25", "SCHEDULE": "1"}, id="accumulation by epoch"),
        pytest.param({"KILL": "batch13,forward21", "UNFREEZE": "1"}, id="a backbone unfrozen"),
        pytest.param({"KILL": "batch13,forward21", "AVERAGE": "1"}, id="averaged weights"),
        pytest.param({"KILL": "batch20,forward35", "AVERAGE": "norm"}, id="statistics of a norm"),
        pytest.param({"KILL": "batch13", "SIGNAL": "SIGTERM"}, id="an announced end"),
    ],
)
def test_a_killed_fit_ends_as_an_undisturbed_one(
    new_run: Callable[..., str], options: dict[str, str]
) -> None:
    """Model, optimizer, scheduler, loops, generators; samples and log lines of every step."""
    require_undisturbed("lightning_training", new_run(), **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("files", ["none", "of its own", "of the script"])
def test_files_of_lightning_go_on_as_before(
    new_run: Callable[..., str], tmp_path: Path, files: str
) -> None:
    """The callback takes the place of no ModelCheckpoint, and needs none."""
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from autockpt.integrations.lightning import Autockpt

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = self.layer(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def test_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("error", self.layer(batch[0]).mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    own = [ModelCheckpoint(monitor="loss")] if files == "of the script" else []
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, enable_checkpointing=files != "none",
        callbacks=[Autockpt(run_dir=new_run()), *own],
    )  # fmt: skip
    loader, module = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4), Module()
    trainer.fit(module, loader)
    assert type(trainer.callbacks[-1]) is Autockpt
    assert bool(list(tmp_path.rglob("*.ckpt"))) == (files != "none")
    if files != "none":
        (told,) = trainer.test(module, loader, ckpt_path="best", verbose=False)
        assert "error" in told


def test_two_ranks_of_a_fit(new_run: Callable[..., str]) -> None:
    """DDP: one rank is killed, both go on."""
    require_undisturbed("lightning_training", new_run(), ranks=2, KILL="batch13", KILL_RANK="1")


def test_two_ranks_that_lightning_starts(new_run: Callable[..., str]) -> None:
    """Plain Python, `Trainer(devices=2)`: no launcher says which rank each is."""
    options = {"KILL": "batch13", "KILL_RANK": "1"}
    require_undisturbed("lightning_training", new_run(), ranks=2, alone=True, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"KILL": "batch13,backward21", "DRAW": "1"}, id="at a step and in backward"),
        pytest.param({"KILL": "batch14,epoch1", "ACCUMULATE": "2"}, id="accumulation"),
    ],
)
def test_a_killed_loop_of_fabric(new_run: Callable[..., str], options: dict[str, str]) -> None:
    """The dict of `fabric.save`, numbers too, and a loader of `setup_dataloaders`."""
    require_undisturbed("fabric_training", new_run(), **options)


@pytest.mark.parametrize("leave", ["10", "7"])
def test_two_ranks_of_fabric(new_run: Callable[..., str], leave: str) -> None:
    """Each rank goes on with its share of the epoch's order, if epochs are left early too."""
    options = {"KILL": "batch13", "LEAVE": leave}
    require_undisturbed("fabric_training", new_run(), ranks=2, **options)


@pytest.mark.filterwarnings("ignore")
def test_a_count_of_batches_in_fabric_is_named(
    new_run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It would begin at 0 in the rest of an epoch."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    from autockpt.integrations.lightning import attach

    fabric = L.Fabric(accelerator="cpu")
    net = torch.nn.Linear(1, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters()))
    ckpt = attach(fabric, {"model": model, "optimizer": optimizer}, run_dir=new_run())
    loader = ckpt.loader(fabric.setup_dataloaders(DataLoader(torch.ones(3, 1))))
    for _ in range(loader.epoch, 1):
        for i, batch in enumerate(loader):
            fabric.backward(model(batch).sum() / (i + 1))
            optimizer.step()
            ckpt.step()
    ckpt.close()
    assert "enumerate(loader, loader.first_batch)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"STYLE": "loaders", "KILL": "batch15,forward22"}, id="two validations"),
        pytest.param({"STYLE": "loaders", "KILL": "validated1,forward22"}, id="in a validation"),
        pytest.param({"STYLE": "gan", "KILL": "between8,backward21"}, id="two optimizers"),
        pytest.param({"STYLE": "manual", "KILL": "backward13,epoch1"}, id="Fabric, two optimizers"),
    ],
)
def test_a_killed_training_of_another_style(
    new_run: Callable[..., str], options: dict[str, str]
) -> None:
    """Early stopping, files, log lines; samples of every step, random numbers."""
    require_undisturbed("lightning_styles", new_run(), **options)


@pytest.mark.parametrize(
    ("batch", "window", "sizes"), [(1, 3, [4, 4, 1, *[3] * 5]), (4, 3, [4, 4, 4, 12])]
)
def test_other_batches_within_an_epoch(
    new_run: Callable[..., str], batch: int, window: int, sizes: list[int]
) -> None:
    """The last batch of the epoch has its step, and a validation behind it."""
    run_dir = new_run()
    trained(TestLightning.framework, "lightning", run_dir, batch=2, accumulation=2, stop=2)
    steps, said = trained(
        TestLightning.framework, "lightning", run_dir, batch=batch, accumulation=window
    )
    first, second = each_epoch(steps)
    assert [len(step) for step in first] == sizes, said
    assert steps[len(first)] == steps[len(first) + len(second) + 1] == [-1], said


def test_a_larger_number_of_steps_goes_on_within_the_epoch(new_run: Callable[..., str]) -> None:
    """The fit ended in its middle; the rest of its samples is trained."""
    framework, run_dir = TestLightning.framework, new_run()
    trained(framework, "lightning", run_dir, batch=4, accumulation=1, steps=4)
    steps, said = trained(framework, "lightning", run_dir, batch=4, accumulation=1, steps=12)
    assert len(each_epoch(steps)) == 2, said
