"""Ranks that Lightning starts are told apart, though it sets no RANK."""

import os
from types import SimpleNamespace

import pytest

from autockpt.integrations.lightning.ranks import tell_ranks
from autockpt.launch import given
from autockpt.launch.rank_env import place_of_rank

STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
"""Of srun, and of the shell of an allocation, which is a step of one task."""
SLURM = ("SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def _owner(rank: int) -> SimpleNamespace:
    """A Trainer, as far as it is asked; rank 0 says `first`."""
    strategy = SimpleNamespace(num_processes=2, broadcast=lambda value, source: "first")
    return SimpleNamespace(world_size=2, global_rank=rank, strategy=strategy)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that Lightning's launcher sets, and no others."""
    monkeypatch.setattr(given, "_given", None)
    for name in ("RANK", *SLURM, "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever the test sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")


@pytest.mark.usefixtures("started")
def test_the_second_rank_is_not_taken_for_the_first() -> None:
    """Both are of one launch, on one node."""
    assert place_of_rank(os.environ | {"LOCAL_WORLD_SIZE": "2"}).rank == 0
    tell_ranks(_owner(1))
    place = place_of_rank(os.environ)
    assert (place.rank, place.world_size, place.local_rank, place.nodes) == (1, 2, 1, 1)
    launch = given.given_launch()
    assert launch is not None
    assert launch.launch_id == "first"


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    ("told", "stands"),
    [
        ({"RANK": "0"}, True),
        ({**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, True),
        ({**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
    ],
)
def test_a_launchers_word_stands(
    told: dict[str, str], stands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun, `autockpt run` and srun have said it; a shell within a step has not."""
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    tell_ranks(_owner(1))
    assert (given.given_launch() is None) == stands
