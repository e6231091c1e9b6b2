"""Nodes of a real Slurm that share no directory: an object store is their durable tier."""

import os
import shutil

import pytest

from autockpt.executors.storage.catalogue import committed_names
from autockpt.run_directory import control_path
from autockpt.values.generation import Generation
from tests.conftest import end_keeper
from tests.slurm.job import TWO, Job, command, undisturbed
from tests.unit.executors.storage.remote.test_remote import endpoint, s3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
__all__ = ["endpoint", "s3"]


@pytest.mark.parametrize("launcher", ["launcher", "ranks"])
def test_all_nodes_are_lost_and_the_store_has_the_run(job: Job, s3: None, launcher: str) -> None:
    """Each node works in a directory of its own; a later job has none of them."""
    url = f"s3://bucket/slurm/{launcher}"
    launch = ("--nproc-per-node", "1") if launcher == "launcher" else ()
    run = command(job, *launch, "--set", f"disk.path={url}", is_placed=False)
    keys = (f'export {name}="{os.environ[name]}"' for name in os.environ if name[:4] == "AWS_")
    task = job.folder / "task.sh"
    task.write_text(f"mkdir -p own-$SLURM_PROCID; cd own-$SLURM_PROCID; exec {run}")
    lines = (*keys, "export NO_PROXY=127.0.0.1", f"exec srun bash {task}")
    job.submit_lines(*lines, options=TWO)
    folders = [job.folder / f"own-{number}" for number in range(2)]
    job.run_dir = folders[0] / control_path(url)
    job.wait_step()
    job.cluster.run("scancel", "--signal=KILL", "--full", job.number)
    job.wait_over("CANCELLED", "FAILED")
    for folder in folders:
        end_keeper(str(folder / control_path(url)), nodes=2)
        shutil.rmtree(folder)
    kept = Generation.from_name(committed_names(url)[-1]).step
    assert kept >= 20
    job.submit(job.folder / "job.sbatch", *TWO)
    job.wait(job.resumed, "the next job goes on")
    assert set(job.resumed()) == {kept}, job.tale()
    assert job.finish() == undisturbed(2), job.tale()
