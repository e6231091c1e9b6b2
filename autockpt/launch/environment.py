"""The launcher's environment variables for trainers, and the signs of a foreign launcher.

* AUTOCKPT_RUN_DIR: the run directory, absolute
* AUTOCKPT_MODE: run, profile, or restore-plan (`autockpt restore --dry-run`)
* AUTOCKPT_LAUNCH_ID: random hex of one launcher: the same for all of its restarts
* AUTOCKPT_LAUNCHER_PID: its process
* AUTOCKPT_NODE: number of this node, which stays when others are lost (several nodes)
* AUTOCKPT_RESUME_FROM: roll back to this generation (optional)
* AUTOCKPT_FRESH: 1: start a new lineage (optional)
* AUTOCKPT_NO_PROFILE: 1: do not measure during the first iterations (optional)
* AUTOCKPT_PLAN_FOR: folder of the checkpoint to plan for (mode restore-plan)
* AUTOCKPT_RESTART_DECIDED_S: CLOCK_MONOTONIC at which the launcher decided to restart (restarts)
* AUTOCKPT_NEW_PROCESS: why a rank that survived does not go on in its process (restarts)
* AUTOCKPT_KEPT_STORE: MASTER_PORT and the port of the launcher's own store (one node)

torchelastic adds RANK, WORLD_SIZE, TORCHELASTIC_RESTART_COUNT and so on.
"""

from collections.abc import Mapping

from autockpt.launch import startup_timing
from autockpt.launch.in_process import decision, kept_store
from autockpt.launch.rank_env import number, rank_and_world, under_srun

RUN_DIR = "AUTOCKPT_RUN_DIR"
MODE = "AUTOCKPT_MODE"
LAUNCH_ID = "AUTOCKPT_LAUNCH_ID"
LAUNCHER_PID = "AUTOCKPT_LAUNCHER_PID"
NODE = "AUTOCKPT_NODE"
RESUME_FROM = "AUTOCKPT_RESUME_FROM"
FRESH = "AUTOCKPT_FRESH"
NO_PROFILE = "AUTOCKPT_NO_PROFILE"
PLAN_FOR = "AUTOCKPT_PLAN_FOR"
RESTART_DECIDED = startup_timing.DECIDED
NEW_PROCESS = decision.NEW_PROCESS
KEPT_STORE = kept_store.VARIABLE

BY_RANK = "RANK and WORLD_SIZE"
"""A launcher of which only these variables are known."""

ALL = (
    RUN_DIR, MODE, LAUNCH_ID, LAUNCHER_PID, NODE, RESUME_FROM, FRESH, NO_PROFILE, PLAN_FOR,
    RESTART_DECIDED, NEW_PROCESS, KEPT_STORE,
)  # fmt: skip


def contract(
    *,
    run_dir: str,
    mode: str,
    launch_id: str,
    launcher_pid: int,
    resume_from: str | None = None,
    fresh: bool = False,
    profile_in_place: bool = True,
) -> dict[str, str]:
    """The variables of one launch."""
    variables = {
        RUN_DIR: run_dir,
        MODE: mode,
        LAUNCH_ID: launch_id,
        LAUNCHER_PID: str(launcher_pid),
    }
    if resume_from is not None:
        variables[RESUME_FROM] = resume_from
    if fresh:
        variables[FRESH] = "1"
    if not profile_in_place:
        variables[NO_PROFILE] = "1"
    return variables


def foreign_launcher(environ: Mapping[str, str]) -> str | None:
    """The launcher that already started this process as a worker, or None: then we launch."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return BY_RANK
    if under_srun(environ):
        return "Slurm"
    return None


def rank(environ: Mapping[str, str]) -> int:
    """Global rank of this process; 0 outside any launcher."""
    return rank_and_world(environ)[0]


def restart_count(environ: Mapping[str, str]) -> int:
    """How often torchelastic has restarted the workers."""
    return number(environ, "TORCHELASTIC_RESTART_COUNT") or 0


# Tables of docs/reference/environment.md; a test compares them with the sources.

FOR_USERS: dict[str, str] = {
    "AUTOCKPT_RUN_DIR": "The run directory of `attach`, where the script names none.",
    "AUTOCKPT_FRESH": "`1`: start from scratch and keep old checkpoints, as `--fresh`.",
    "AUTOCKPT_RESUME_FROM": "Roll back to this checkpoint, as `--resume-from`.",
    "AUTOCKPT_SAME_JOB": "`1`: resume a run whose arguments differ, as `--same-job`.",
    "AUTOCKPT_DATA": "`script`: the script puts its loop and data in place after a resume.",
    "AUTOCKPT_DEBUG": "`1`: show tracebacks, as `--debug`.",
    "AUTOCKPT_DOMAINS": "Failure domains: a table of nodes, or `power=p1,rack=r7` of this node.",
    "AUTOCKPT_CONTROL_INTERFACE": "The network interface on which keepers of several nodes meet.",
    "AUTOCKPT_METRICS_PORT": "The keeper serves Prometheus text on this port of 127.0.0.1.",
    "AUTOCKPT_NODE": "The number of this node, which it keeps when other nodes are lost.",
    "AUTOCKPT_DISK_PATH": "The policy key `disk.path`. Ray Train's store where it is unset.",
    "AUTOCKPT_DISK_WRITERS": "An example of a policy key: `disk.writers`. Other keys work alike.",
}
"""By name: its effect."""

SET_BY_THE_LAUNCHER: dict[str, str] = {
    "AUTOCKPT_LAUNCHER_PID": "The process that restarts the ranks.",
    "AUTOCKPT_LAUNCH_ID": "Distinguishes two launches of one run.",
    "AUTOCKPT_MODE": "`run`, `profile` or `restore-plan`.",
    "AUTOCKPT_NO_PROFILE": "`1`: do not measure during the first iterations, as `--no-profile`.",
    "AUTOCKPT_PLAN_FOR": "The checkpoint folder that `autockpt restore --dry-run` plans for.",
    "AUTOCKPT_RESTART_DECIDED_S": "The time at which the launcher decided to restart.",
    "AUTOCKPT_NEW_PROCESS": "Why a rank that survived another one has a new process.",
    "AUTOCKPT_KEPT_STORE": "Ports of torch's store and of the one for `autockpt.restartable`.",
    "AUTOCKPT_STANDBY": "The descriptor at which a standby process waits for its restart.",
    "AUTOCKPT_EMULATED_DEVICE_LINK": "A stand-in for a device link, in tests and benchmarks.",
}
"""By name: its meaning.  A user never sets these."""
