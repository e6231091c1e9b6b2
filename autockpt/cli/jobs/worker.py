"""Under torchrun or Slurm this process is a rank already: prepare, then run the script in it."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autockpt.cli.checkpoints.remote import require_back
from autockpt.cli.jobs.preparation import (
    Request,
    check_directory,
    goal_for,
    in_control_directory,
    placed,
    prepare,
    profile_of,
    require_free,
    scale_of,
    write_decision,
)
from autockpt.cli.jobs.slurm import rank_variables
from autockpt.cli.shared.plan_choice import Scale
from autockpt.console import Console
from autockpt.executors.storage.directory.claims import boot_id
from autockpt.launch import environment
from autockpt.launch.elastic import compiled_code
from autockpt.launch.rank_env import agent_of, place_of_rank, under_srun
from autockpt.launch.script import Script
from autockpt.run_directory import RunDirectory, default_path
from autockpt.values.errors import AutockptError, ConfigError, StorageError

LEADER_WAIT_S = 60.0
"""How long the other ranks wait for rank 0 to prepare the directory."""
TAG_DIGITS = 10
"""Of a launch in the name of its directory: not as many as other jobs' own runs have."""
STORE_WAIT_S = 600.0
"""The same where the first rank asks an object store, which may take minutes to give no answer."""


def as_worker(request: Request, foreign: str, console: Console) -> Callable[[], int]:
    """Prepare the directory (rank 0) or wait for it; what runs the script afterwards."""
    scale = scale_of(request.launching)
    request = in_control_directory(request)
    path = request.run_dir or _shared_path(request.script, scale)
    if request.run_dir is not None:
        speaks = environment.rank(os.environ) == 0
        request = placed(request, console if speaks else None)
        path = request.run_dir or path
    here = replace(request, run_dir=path)
    first(
        path, scale, lambda launch_id: _prepare(here, scale, launch_id, foreign, console),
        on_each_node=goal_for(here, scale).is_in_store,
    )  # fmt: skip
    variables = {environment.RUN_DIR: os.path.abspath(path), environment.MODE: "run"}
    if request.resume_from:
        variables[environment.RESUME_FROM] = request.resume_from
    if request.fresh:
        variables[environment.FRESH] = "1"
    if not request.use_profile:
        variables[environment.NO_PROFILE] = "1"
    run = RunDirectory(os.path.abspath(path))
    goal = run.read_goal()
    wish = None if goal is None else goal.restart.caches
    caches = compiled_code.chosen(wish, run.caches, os.environ, single_node=scale.nodes == 1)
    os.environ.update({**caches, **rank_variables(os.environ), **variables})
    return run_here(request.script, requeues=under_srun(os.environ))


def first(
    path: str, scale: Scale, prepare_as: Callable[[str], None], *, on_each_node: bool = False
) -> None:
    """At the start of a launch rank 0 prepares its directory, and the others wait for that.

    `prepare_as` gets the id of the launch, which it leaves in run.json when all is there.
    `on_each_node`: the first rank of each node does that, since nodes share no directory.
    """
    if environment.restart_count(os.environ) != 0:
        return
    launch_id = _launch_id(scale)
    place = place_of_rank(os.environ)
    if place.rank == 0 or (on_each_node and place.nodes > 1 and place.local_rank == 0):
        prepare_as(launch_id)
    else:
        _wait_for_leader(path, launch_id, in_store=on_each_node)


def run_here(script: Script, *, requeues: bool = False) -> Callable[[], int]:
    """Return a function that runs the script when the command line is off the stack.

    `requeues`: no launcher is between this rank and the scheduler.
    """

    def execute() -> int:
        from autockpt.cli import script_runner

        script_runner.execute(script.target, script.args, module=script.module, requeues=requeues)
        return 0

    return execute


def _prepare(
    request: Request, scale: Scale, launch_id: str, foreign: str, console: Console
) -> None:
    path = str(request.run_dir)
    goal = goal_for(request, scale)
    check_directory(request, goal)
    found = profile_of(request, scale, console)
    run = RunDirectory.create(path)
    require_free(run, goal, launch_id)
    prepare(run, request.script, "run", goal, scale, anew=request.takes)
    if not request.fresh:
        require_back(run, goal, console)
    plan = write_decision(run, request, goal, found, scale.nodes)
    is_first = environment.rank(os.environ) == 0
    if is_first:
        console.say(f"plan: {plan}")
    # Last, because the other ranks wait for it.
    prepare(run, request.script, "run", goal, scale, launch_id)
    if not is_first:
        return
    console.say(f"started by {foreign}: this is rank 0; run directory: {path}")
    console.next(["autockpt", "report", str(path)], note="is for when it is over")


def _shared_path(script: Script, scale: Scale) -> str:
    """A directory that every rank of this launch names alike, also after a restart.

    No date is in it: one that is worked out from a start changes when the clock is set.
    """
    name = default_path(script.target)
    stem = name.name[: -len("-YYYYmmdd-HHMMSS")]
    if "SLURM_JOB_ID" in os.environ:
        return str(name.with_name(f"{stem}-slurm-{os.environ['SLURM_JOB_ID']}"))
    if scale.nodes > 1:
        raise ConfigError(
            "ranks on several nodes must agree on a directory: add --run-dir DIR (shared storage)"
        )
    import hashlib

    launch = f"{boot_id()} {_started(agent_of(os.environ, os.getppid()))}"
    tag = hashlib.sha256(launch.encode()).hexdigest()[:TAG_DIGITS]
    return str(name.with_name(f"{stem}-launch-{tag}"))


def _launch_id(scale: Scale) -> str:
    """The same on every rank of this launch, another one at the next."""
    import hashlib

    names = (
        "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID",
        "SLURM_RESTART_COUNT",
    )  # fmt: skip
    facts = [os.environ.get(name, "") for name in names]
    # Tasks of srun may each have a shell of their own above them.
    if scale.nodes == 1 and not under_srun(os.environ):
        facts.append(_started(agent_of(os.environ, os.getppid())))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _started(pid: int) -> str:
    """The process and the ticks of this boot at which it started: pids are used again."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return f"{pid} {stat.rpartition(')')[2].split()[19]}"


def _wait_for_leader(path: str, launch_id: str, *, in_store: bool) -> None:
    """Until the first rank has written the directory of this launch.

    Raises ConfigError, or StorageError where that rank has to wait for a store itself.
    """
    within_s = STORE_WAIT_S if in_store else LEADER_WAIT_S
    deadline = time.monotonic() + within_s
    run = RunDirectory(path)
    while time.monotonic() < deadline:
        try:
            info = run.read_info()
        except AutockptError:
            info = None
        if info is not None and info.launch_id == launch_id:
            return
        time.sleep(0.05)
    if in_store:
        raise StorageError(
            f"{path}: the first rank of this node prepared no run directory within {within_s:.0f} "
            "s; does the object store of disk.path answer?"
        )
    raise ConfigError(
        f"{path}: rank 0 did not prepare the run directory within {within_s:.0f} s; is it on "
        "storage that all ranks share?"
    )
