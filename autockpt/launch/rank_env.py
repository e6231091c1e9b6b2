"""How a launcher tells a process which rank it is, and where the others are.

    torchrun, autockpt run   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE
    deepspeed                RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE
    srun                     SLURM_PROCID, SLURM_STEP_NUM_TASKS (or SLURM_NTASKS where that is
                             missing), SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE; a script may copy
                             the first two to RANK and WORLD_SIZE
    pods, scripts            RANK, WORLD_SIZE and MASTER_ADDR; LOCAL_WORLD_SIZE where ranks that
                             share a node cannot be told

Session, command line and profiling ask here, so that all of them mean the same job.  SLURM_STEP_ID
tells tasks of srun from the batch script, which has the other variables, too.  The shell of salloc
may be a step of one task, and its SLURM_NTASKS is that of the allocation.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autockpt.values.errors import ConfigError

_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank, as its launcher started it."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    """Ranks of its node; they follow one another."""
    nodes: int
    """The number of nodes of the job."""


def rank_and_world(environ: Mapping[str, str]) -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) where the environment has neither."""
    a_task = "SLURM_STEP_ID" in environ
    rank = number(environ, "RANK", *(("SLURM_PROCID",) if a_task else ()))
    world_size = number(environ, "WORLD_SIZE", *(_TASKS if a_task else ()))
    return rank or 0, 1 if world_size is None else world_size


def place_of_rank(environ: Mapping[str, str]) -> RankPlace:
    """Where this process stands.

    Raises ConfigError where nothing says which ranks share a node, or where they are dealt out.
    """
    rank, world_size = rank_and_world(environ)
    said = number(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    local_rank = number(environ, "LOCAL_RANK")
    if said is not None:
        size = max(1, said)
        nodes = number(environ, "GROUP_WORLD_SIZE") or max(1, -(-world_size // size))
        first = rank - rank % size
    else:
        sizes = _ranks_per_node(environ, rank, world_size)
        node, first = 0, 0
        while first + sizes[node] <= rank and node < len(sizes) - 1:
            node, first = node + 1, first + sizes[node]
        size, nodes = sizes[node], len(sizes)
        if under_srun(environ) and number(environ, "SLURM_LOCALID") not in (None, rank - first):
            raise ConfigError(
                f"rank {rank} is task {environ['SLURM_LOCALID']} of its node, not {rank - first}: "
                "ranks of a node must follow one another; use srun --distribution=block"
            )
    return RankPlace(
        rank=rank, world_size=world_size, local_size=size, nodes=nodes,
        local_rank=rank - first if local_rank is None else local_rank,
    )  # fmt: skip


def under_srun(environ: Mapping[str, str]) -> bool:
    """Whether this is one of several ranks that srun started, with no launcher between."""
    if "SLURM_STEP_ID" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return False
    tasks = number(environ, *_TASKS) or 1
    ranks = (number(environ, "SLURM_PROCID"), tasks)
    return tasks > 1 and rank_and_world(environ) == ranks


def slurm_launch(environ: Mapping[str, str]) -> str:
    """Return the launch id of all tasks of one srun; a requeued job has the same."""
    return f"slurm-{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"


def allocation_left_s(environ: Mapping[str, str], now_s: float) -> float | None:
    """Seconds until Slurm's allocation ends, at the wall clock `now_s`; None outside of one."""
    ends = number(environ, "SLURM_JOB_END_TIME")
    return None if ends is None else ends - now_s


def agent_of(environ: Mapping[str, str], pid: int) -> int:
    """Return the process that started this rank.

    From the rank's parent, `pid`, upwards it is the first without torchrun's name of the launch, or
    else without the rank.  Processes below it are scripts around ours, and other ones for every
    rank and restart.  Where all processes have the variable, as in a pod, it is the parent.
    """
    name = "TORCHELASTIC_RUN_ID"
    if environ.get(name, "none") == "none":
        name = "RANK"
    told, found = os.fsencode(f"{name}={environ.get(name)}"), pid
    try:
        while told in Path(f"/proc/{found}/environ").read_bytes().split(b"\0"):
            stat = Path(f"/proc/{found}/stat").read_bytes()
            found = int(stat.rpartition(b")")[2].split()[1])
    except FileNotFoundError:  # above the first process, or one that is gone
        return pid
    except OSError:  # of somebody else
        return found
    return found


def number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is a number."""
    texts = (environ.get(name, "") for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)


def _ranks_per_node(environ: Mapping[str, str], rank: int, world_size: int) -> tuple[int, ...]:
    if under_srun(environ):
        names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        listed = next((environ[name] for name in names if name in environ), "")
        counts = _expanded(listed)
        if sum(counts) == world_size:
            return counts
        nodes = number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 0
        if nodes and world_size % nodes == 0:
            return (world_size // nodes,) * nodes
    one_node = number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") == 1
    if world_size <= 1 or one_node or _is_loopback(environ.get("MASTER_ADDR", "")):
        return (world_size,)
    raise ConfigError(
        f"rank {rank} of {world_size}: nothing says which ranks share a node. Set LOCAL_WORLD_SIZE "
        f"for each (1 where every rank has a host of its own, {world_size} where all share one)"
    )


def _expanded(listed: str) -> tuple[int, ...]:
    """Slurm's `5,4(x3)` is (5, 4, 4, 4); () for anything else.

    Source: the manual of srun, SLURM_TASKS_PER_NODE.
    """
    counts: list[int] = []
    for part in listed.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part.strip())
        if found is None:
            return ()
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def _is_loopback(host: str) -> bool:
    """Whether ranks that meet there share a machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
