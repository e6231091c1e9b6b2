"""`srun autockpt run`: as a launcher on each node, and as a rank a task."""

import pytest

from tests.conftest import keeper_pids
from tests.slurm.cluster import free_ports
from tests.slurm.job import ARGS, TRAINING, TWO, Job, command, undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("explicit", [False, True], ids=["by-slurm", "explicit"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_launcher_on_each_node(job: Job, nodes: int, explicit: bool) -> None:
    """A killed rank is restarted within the step, from memory."""
    options = ["--nproc-per-node", str(2 // nodes)]
    if explicit:
        (port,) = free_ports(1)
        options += ["--nnodes", str(nodes), "--rdzv-endpoint", f"127.0.0.1:{port}",
                    "--rdzv-id", "written"]  # fmt: skip
    job.submit_lines(
        f"srun {command(job, *options)}", options=(f"--nodes={nodes}", "--ntasks-per-node=1")
    )
    job.wait_step()
    job.kill_rank(1)
    job.wait(job.resumed, "the ranks go on")
    assert job.finish() == undisturbed(2), job.tale()
    assert "from memory" in job.said()


@pytest.mark.parametrize("launched", ["autockpt", "python"])
def test_a_rank_a_task(job: Job, launched: str) -> None:
    """srun is the launcher: a killed rank ends the step, and a requeue goes on from disk."""
    if launched == "autockpt":
        lines = [f"exec srun {command(job)}"]
    else:
        training = f"python -u {TRAINING} {' '.join(ARGS)} --run-dir {job.run_dir}"
        (port,) = free_ports(1)
        lines = [
            f"export MASTER_ADDR=127.0.0.1 MASTER_PORT={port} AUTOCKPT_NO_PROFILE=1",
            "export AUTOCKPT_MEMORY_INTERVAL='5 steps' AUTOCKPT_DISK_INTERVAL='20 steps'",
            "export RANK_OF='export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS; '",
            f'exec srun bash -c "$RANK_OF exec {training}"',
        ]
    job.submit_lines(*lines, options=(*TWO, "--requeue"))
    job.wait_step()
    job.kill_rank(1)
    job.wait_over("FAILED")
    if job.cluster.ends_steps:
        job.wait(lambda: not any(keeper_pids(str(job.run_dir), n) for n in (0, 1)), "no keeper")
    job.cluster.run("scontrol", "requeue", job.number)
    job.start_again()
    job.wait(job.resumed, "the job goes on")
    assert job.finish() == undisturbed(2), job.tale()


def test_doctor_says_what_a_step_takes_along(job: Job) -> None:
    """The finding of the plan: keepers end with the step under proctrack/cgroup."""
    job.submit_lines("srun autockpt doctor .", options=("--ntasks=1",))
    ends, stay = "Slurm ends every process of a step", "keepers stay behind"
    job.wait(lambda: ends in job.said() or stay in job.said(), "the finding")
    assert (ends in job.said()) == job.cluster.ends_steps, job.tale()
