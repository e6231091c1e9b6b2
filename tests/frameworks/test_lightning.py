"""Fits and Fabric loops that are killed end as undisturbed ones of bare Lightning do."""

from collections.abc import Callable

import pytest

from tests.frameworks.undisturbed import require_undisturbed

pytest.importorskip("lightning", reason="Lightning is not installed: make test-frameworks")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


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
        pytest.param({"KILL": "batch13,forward21", "COMBINED": "max_size_cycle"}, id="two loaders"),
        pytest.param({"KILL": "batch13,forward21", "WORKERS": "2"}, id="workers that persist"),
        pytest.param({"KILL": "batch13", "SIGNAL": "SIGTERM"}, id="an announced end"),
    ],
)
def test_a_killed_fit_ends_as_an_undisturbed_one(
    new_run: Callable[..., str], options: dict[str, str]
) -> None:
    """Model, optimizer, scheduler, loops, generators; samples and log lines of every step."""
    require_undisturbed("lightning_training", new_run(), **options)


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


def test_two_ranks_of_fabric(new_run: Callable[..., str]) -> None:
    """Each rank goes on with its share of the epoch's order."""
    require_undisturbed("fabric_training", new_run(), ranks=2, KILL="batch13")
