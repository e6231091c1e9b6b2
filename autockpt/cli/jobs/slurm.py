"""Under srun: a rank for each task, or a launcher on each node; both from Slurm's variables.

    srun --ntasks-per-node=8 autockpt run train.py                     each task is a rank
    srun --ntasks-per-node=1 autockpt run --nproc-per-node 8 train.py  each task launches 8 ranks

Any launch option makes the second form.  Slurm's variables fill in the options that are missing.

Source: the manual of srun, "OUTPUT ENVIRONMENT VARIABLES".
"""

import os
import socket
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from autockpt.launch.rank_env import number, place_of_rank, slurm_launch, under_srun
from autockpt.profiles.imports.node_list import expand
from autockpt.values.errors import ConfigError

FIRST_PORT, PORTS = 20000, 12000
"""Where a job meets: below the ports that Linux gives to outgoing connections."""
TASK_VARIABLE = "SLURM_STEP_ID"
"""Without it a process is no task of srun."""
_MEETING = ("rdzv_endpoint", "rdzv_id", "nnodes", "nproc_per_node", "node_rank")


def launching_on_nodes(
    environ: Mapping[str, str],
    launching: Mapping[str, Any],
    given: Collection[str],
    resolves: Callable[[str], bool] | None = None,
) -> dict[str, Any] | None:
    """Launch options of a task that launches ranks; None: the task is a rank, or srun is not there.

    `given`: the launch options that a person wrote.  Raises ConfigError where srun started several
    tasks on a node, or where nothing says which node is the first.
    """
    if not under_srun(environ) or not set(given) & set(_MEETING):
        return None
    place = place_of_rank(environ)
    if place.nodes != place.world_size:
        raise ConfigError(
            f"srun started {place.local_size} tasks on a node, and each would launch ranks; use "
            "srun --ntasks-per-node=1, or leave the launch options out"
        )
    wanted = dict(launching)
    if "nnodes" not in given:
        wanted["nnodes"] = str(place.nodes)
    if "node_rank" not in given:
        wanted["node_rank"] = place.rank
    if "rdzv_endpoint" not in given:
        wanted["rdzv_endpoint"] = f"{first_host(environ, resolves)}:{meeting_port(environ)}"
    if "rdzv_id" not in given:
        wanted["rdzv_id"] = slurm_launch(environ)
    return wanted


def rank_variables(
    environ: Mapping[str, str], resolves: Callable[[str], bool] | None = None
) -> dict[str, str]:
    """The variables that a script under torchrun has and that a task of srun lacks.

    A value that is set already stays.  Raises ConfigError where ranks are dealt out over nodes.
    """
    if not under_srun(environ):
        return {}
    place = place_of_rank(environ)
    found = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
    }
    if place.local_size * place.nodes == place.world_size:
        found["LOCAL_WORLD_SIZE"] = str(place.local_size)
    if "MASTER_ADDR" not in environ:
        one = place.nodes == 1
        found["MASTER_ADDR"] = "127.0.0.1" if one else first_host(environ, resolves)
    found["MASTER_PORT"] = str(meeting_port(environ))
    return {name: value for name, value in found.items() if name not in environ}


def first_host(environ: Mapping[str, str], resolves: Callable[[str], bool] | None = None) -> str:
    """A name or address of the first node.  Raises ConfigError where nothing says it."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    try:
        names = expand(listed)
    except ValueError:
        names = ()
    if names and (resolves or _resolves)(names[0]):
        return names[0]
    # The host of the batch script, which is the first node of an allocation by sbatch.
    address = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if address:
        return address
    raise ConfigError(
        f"the first node of {listed or 'the job'!r} has no address here; set MASTER_ADDR, or name "
        "the place to meet with --rdzv-endpoint HOST:PORT"
    )


def meeting_port(environ: Mapping[str, str]) -> int:
    """A port that all tasks of a step find alike; two jobs of one cluster get different ones.

    Clusters that share a host number their jobs alike, so the cluster and its user count as well.
    """
    job, step = number(environ, "SLURM_JOB_ID") or 0, number(environ, TASK_VARIABLE) or 0
    cluster = " ".join(environ.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_UID"))
    return FIRST_PORT + (zlib.crc32(os.fsencode(cluster)) + job * 7 + step) % PORTS


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False
