"""What launchers say of a rank: the same wherever it is asked for, or a word on what is missing."""

import os

import pytest

from autockpt.cli.jobs.preparation import scale_of
from autockpt.launch.rank_env import RankPlace, place_of_rank, under_srun
from autockpt.profiling.facts.ranks import Ranks
from autockpt.session.job import _launcher
from autockpt.values.errors import ConfigError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_NTASKS": "16", "SLURM_NNODES": "2"}
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0"}
PARENT = f"agent-{os.getppid()}"
OWN = "process-{pid}"


def place(rank: int, world: int, local_rank: int, local: int, nodes: int) -> RankPlace:
    """In the order of a row."""
    return RankPlace(
        rank=rank, world_size=world, local_rank=local_rank, local_size=local, nodes=nodes
    )


def srun(rank: int, local_rank: int, **more: str) -> dict[str, str]:
    """A task of 16 on 2 nodes."""
    return {**SRUN, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank), **more}


@pytest.mark.parametrize(
    ("environ", "expected", "launch"),
    [
        ({}, place(0, 1, 0, 1, 1), OWN),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, place(3, 4, 1, 2, 2), "torchrun-x"),
        (  # torchrun on nodes of 3 and 1
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2"},
            place(3, 4, 0, 1, 2), "torchrun-x",
        ),
        (  # torchrun below srun, one a node
            srun(1, 0, SLURM_NTASKS="2", LOCAL_WORLD_SIZE="2", **TORCHRUN),
            place(3, 4, 1, 2, 2), "torchrun-x",
        ),
        ({**POD, "LOCAL_SIZE": "2", "LOCAL_RANK": "1"}, place(1, 2, 1, 2, 1), PARENT),  # deepspeed
        ({**POD, "LOCAL_WORLD_SIZE": "1"}, place(1, 2, 0, 1, 2), PARENT),
        ({**POD, "MASTER_ADDR": "127.0.0.1"}, place(1, 2, 1, 2, 1), PARENT),
        ({**POD, "SLURM_NNODES": "1", "SLURM_PROCID": "0"}, place(1, 2, 1, 2, 1), PARENT),
        (srun(9, 1, SLURM_STEP_TASKS_PER_NODE="8(x2)"), place(9, 16, 1, 8, 2), "slurm-7.2"),
        (srun(9, 1, SLURM_TASKS_PER_NODE="8(x2)"), place(9, 16, 1, 8, 2), "slurm-7.2"),
        (srun(9, 1), place(9, 16, 1, 8, 2), "slurm-7.2"),
        (srun(14, 0, SLURM_TASKS_PER_NODE="7(x2),2"), place(14, 16, 0, 2, 3), "slurm-7.2"),
        (srun(9, 1, RANK="9", WORLD_SIZE="16"), place(9, 16, 1, 8, 2), "slurm-7.2"),
        (srun(9, 1, LOCAL_WORLD_SIZE="4"), place(9, 16, 1, 4, 4), "slurm-7.2"),
        (  # a step of a part of the allocation
            srun(9, 1, SLURM_NTASKS="32", SLURM_STEP_NUM_TASKS="16"),
            place(9, 16, 1, 8, 2), "slurm-7.2",
        ),
        (  # the shell of salloc, a step of its own
            srun(0, 0, SLURM_STEP_NUM_TASKS="1", SLURM_STEP_NUM_NODES="1"),
            place(0, 1, 0, 1, 1), OWN,
        ),
        (  # the batch script itself
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"},
            place(0, 1, 0, 1, 1), OWN,
        ),
    ],
)  # fmt: skip
def test_a_rank_knows_its_place_and_its_launch(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    expected: RankPlace,
    launch: str,
) -> None:
    """So does the command line that decides for it, and the profiler that measures it."""
    monkeypatch.setattr(os, "environ", environ)
    assert place_of_rank(environ) == expected
    assert _launcher()[0].startswith(launch.format(pid=os.getpid()))
    scale = scale_of({"nnodes": "1", "nproc_per_node": "1"})
    assert (scale.world_size, scale.nodes) == (expected.world_size, expected.nodes)
    ranks = Ranks.find()
    assert (ranks.rank, ranks.local_rank) == (expected.rank, expected.local_rank)
    assert (ranks.world_size, ranks.local_world_size) == (expected.world_size, expected.local_size)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (POD, "rank 1 of 2: nothing says which ranks share a node. Set LOCAL_WORLD_SIZE"),
        ({**POD, "MASTER_ADDR": "10.0.0.1"}, "Set LOCAL_WORLD_SIZE"),
        (srun(9, 1, SLURM_NNODES="3"), "Set LOCAL_WORLD_SIZE"),
        (srun(9, 4), "task 4 of its node, not 1: .* srun --distribution=block"),
    ],
)
def test_a_rank_that_cannot_know_its_place_says_what_is_missing(
    environ: dict[str, str], told: str
) -> None:
    """Two hosts that each take themselves for node 0 would write into one another's files."""
    with pytest.raises(ConfigError, match=told):
        place_of_rank(environ)


def test_only_tasks_of_srun_are_its_ranks() -> None:
    """Not the batch script, a single task, or what a launcher below it started."""
    assert under_srun(srun(9, 1))
    assert not under_srun({k: v for k, v in srun(0, 0).items() if k != "SLURM_STEP_ID"})
    assert not under_srun(srun(0, 0, SLURM_NTASKS="1"))
    assert not under_srun(srun(0, 0, SLURM_STEP_NUM_TASKS="1"))
    assert not under_srun(srun(0, 0, TORCHELASTIC_RUN_ID="none"))
    assert not under_srun(srun(0, 0, RANK="1", WORLD_SIZE="2"))
