"""Ends that Slurm announces, and one that it does not: what is lost, and how the job goes on."""

import math
import re
import shlex
import sys
import time

import pytest

from tests.slurm.job import ARGS, POLICY, TRAINING, TWO, Job, command, undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
LAUNCHERS = ["launcher", "ranks"]
REQUEUED = ("code=$?", '[ "$code" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"', 'exit "$code"')


def training(job: Job, launcher: str, *options: str) -> str:
    """A launcher on each of two nodes, or a rank on each."""
    launch = ("--nproc-per-node", "1") if launcher == "launcher" else ()
    return " ".join(("srun", *options, command(job, *launch)))


def limit(job: Job) -> str:
    """Minutes in which a job starts on this machine, and trains half of its steps."""
    begun = time.monotonic()
    undisturbed.__wrapped__(2)
    minutes = 3 + math.ceil((time.monotonic() - begun) / 15)
    job.slow_s = float(minutes)
    return str(minutes)


def require_goes_on(job: Job, *, least: int) -> None:
    """The second start resumed what the first trained last; the end is the undisturbed one."""
    job.wait(job.resumed, "the job goes on")
    resumed = job.resumed()[0]
    assert resumed >= least, (resumed, least, job.tale())
    assert job.finish() == undisturbed(2), job.tale()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scancel_of_usr1(job: Job, launcher: str) -> None:
    """All that was trained is durable, and exit code 75 says so to the job script."""
    job.submit_lines(training(job, launcher), *REQUEUED, options=(*TWO, "--requeue"))
    reached = job.wait_step()
    job.cluster.run("scancel", "--signal=USR1", job.number)
    job.start_again()
    require_goes_on(job, least=reached)
    assert job.facts()["Restarts"] == "1"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_requeue_by_hand(job: Job, launcher: str) -> None:
    """SIGTERM and KillWait: the same job goes on where it was."""
    job.submit_lines(f"exec {training(job, launcher)}", options=(*TWO, "--requeue"))
    reached = job.wait_step()
    job.cluster.run("scontrol", "requeue", job.number)
    job.start_again()
    require_goes_on(job, least=reached)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scancel(job: Job, launcher: str) -> None:
    """SIGTERM and KillWait; the next job of the same run directory goes on."""
    job.submit_lines(f"exec {training(job, launcher)}", options=TWO)
    reached = job.wait_step()
    job.cluster.run("scancel", job.number)
    job.wait_over("CANCELLED")
    job.submit(job.folder / "job.sbatch", *TWO)
    require_goes_on(job, least=reached)


def test_time_limit_without_a_signal_before_it(job: Job) -> None:
    """SIGTERM at the limit, and KillWait."""
    job.submit_lines(f"exec {training(job, 'launcher')}", options=(*TWO, f"--time={limit(job)}"))
    job.wait_over("TIMEOUT")
    reached = job.step()
    job.submit(job.folder / "job.sbatch", *TWO)
    require_goes_on(job, least=reached)


def test_signal_to_the_batch_script(job: Job) -> None:
    """--signal=B:USR1@N: the script passes it on, waits, and queues the job again."""
    lines = (
        "trap 'scancel --signal=USR1 \"$SLURM_JOB_ID\"' USR1",
        f"{training(job, 'launcher')} &",
        'wait "$!"; code=$?',
        'while [ "$code" -gt 128 ] && kill -0 "$!" 2>/dev/null; do wait "$!"; code=$?; done',
        'wait "$!"; code=$?',
        *REQUEUED[1:],
    )
    options = (*TWO, "--requeue", f"--time={limit(job)}", "--signal=B:USR1@60")
    job.submit_lines(*lines, options=options)
    job.wait(lambda: job.facts()["Restarts"] == "1", "it is queued again")
    reached = job.step()
    job.start_again()
    require_goes_on(job, least=reached)


def test_slurm_init_as_printed(job: Job) -> None:
    """The job script that `autockpt slurm init` writes: signal, time limit, requeue."""
    job.cluster.run(
        sys.executable, "-m", "autockpt", "slurm", "init", "--nodes", "2", "--ranks", "1",
        "--cpus", "1", "--time", limit(job), "--notice", "60", str(TRAINING), *ARGS,
        folder=job.folder,
    )  # fmt: skip
    job.submit(job.folder / "autockpt.sbatch")
    job.run_dir = job.folder / "runs" / f"training-{job.number}"
    job.wait(lambda: job.facts()["Restarts"] == "1", "it is queued again")
    reached = job.step()
    job.start_again()
    require_goes_on(job, least=reached)


def test_lost_node(job: Job) -> None:
    """NODE_FAIL: Slurm ends the job's other nodes and queues it again; it goes on from disk."""
    job.submit_lines(f"exec {training(job, 'launcher')}", options=(*TWO, "--requeue"))
    job.wait_step()
    lost = job.facts()["NodeList"]
    names = [name for name in job.cluster.nodes if job.trains_on(name)]
    assert len(names) == 2, lost
    job.cluster.lose_node(names[1])
    job.start_again()
    require_goes_on(job, least=20)
    job.cluster.bring_back(names[1])


def test_array(job: Job) -> None:
    """Each task has a run of its own, also where both name one directory."""
    line = command(job, seed=0).replace("--seed 0", '--seed "$SLURM_ARRAY_TASK_ID"')
    job.submit_lines(f"exec srun {line}", options=("--array=0-1", "--ntasks=1", "--requeue"))
    job.hold.touch()
    job.wait(lambda: len(re.findall(r"^digest: ", job.said(), re.M)) == 2, "both tasks end")
    found = set(re.findall(r"^digest: (\w+)$", job.said(), re.M))
    assert found == {undisturbed(1, 0), undisturbed(1, 1)}, job.tale()


FAILS = """
import os
import torch
import autockpt

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = autockpt.attach(model=model, optimizer=optimizer)
for step in ckpt.steps(50):
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    if step == 30:
        os._exit(3)
"""


def test_a_job_that_comes_no_further_is_held(job: Job) -> None:
    """Exit code 93 after three such ends: Slurm's RequeueExitHold keeps it until somebody looks."""
    script = job.folder / "fails.py"
    script.write_text(FAILS)
    run = shlex.join(("autockpt", "run", *POLICY, "--run-dir", str(job.run_dir), str(script)))
    job.submit_lines(f"exec srun {run}", options=("--ntasks=1", "--requeue"))
    job.wait(lambda: "held" in job.facts()["Reason"].lower(), "the job is held")
    facts = job.facts()
    assert (facts["JobState"], facts["Restarts"]) == ("SPECIAL_EXIT", "1"), job.tale()
