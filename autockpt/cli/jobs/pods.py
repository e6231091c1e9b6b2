"""In a pod: launch options from variables that are set there, and a keeper with its own container.

PET_NNODES, PET_NPROC_PER_NODE and their like are torchrun's options by its own rule.  The pods of a
TrainJob meet at PET_MASTER_ADDR and PET_MASTER_PORT.  JOB_COMPLETION_INDEX numbers the pods of an
Indexed Job or a JobSet.

Source: torch.distributed.run, "env" of its options; kubernetes.io, "Indexed Job".
"""

import contextlib
import os
import signal
import threading
from collections.abc import Collection, Mapping
from typing import Any

import click

from autockpt.cli.shared.options import Command, common
from autockpt.console import Console
from autockpt.launch.rank_env import number
from autockpt.values.errors import ConfigError

TEXTS = ("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf")
COUNTS: dict[str, tuple[str, ...]] = {
    "node_rank": ("PET_NODE_RANK", "JOB_COMPLETION_INDEX"),
    "max_restarts": ("PET_MAX_RESTARTS",),
}
MASTER_PORT = 29400
"""That of torchrun's own rendezvous, where no port is set."""
LOOK_S = 1.0
"""Between two looks whether the keeper is there."""
DRAIN_S = 3600.0
"""The scheduler ends the wait for checkpoints that are being written, not we."""
EXAMPLES = """
autockpt keeper --run-dir /runs/train                              # beside `autockpt run`
autockpt keeper --run-dir /runs/train --checkpoints s3://bucket/run    # as disk.path says
"""


def launching_in_pods(
    environ: Mapping[str, str], launching: Mapping[str, Any], given: Collection[str]
) -> dict[str, Any]:
    """Launch options, with the pod's variables for all that a person did not write.

    Raises ConfigError for a number that is none.
    """
    wanted = dict(launching)
    for name in TEXTS:
        text = environ.get(f"PET_{name.upper()}", "")
        if text and name not in given:
            wanted[name] = text
    for name, variables in COUNTS.items():
        for variable in variables:
            if environ.get(variable) and number(environ, variable) is None:
                raise ConfigError(f"{variable}={environ[variable]!r:.40}: expected a whole number")
        found = number(environ, *variables)
        if found is not None and name not in given:
            wanted[name] = found
    host = environ.get("PET_MASTER_ADDR", "")
    if host and not wanted["rdzv_endpoint"] and wanted["nnodes"] not in ("1", "1:1"):
        wanted["rdzv_endpoint"] = f"{host}:{number(environ, 'PET_MASTER_PORT') or MASTER_PORT}"
        wanted["rdzv_id"] = wanted["rdzv_id"] or wanted["rdzv_endpoint"]  # equal in all pods
    return wanted


@click.command(cls=Command, examples=EXAMPLES)
@click.option("--run-dir", required=True, metavar="DIR", help="That of `autockpt run`.")
@click.option(
    "--node", type=click.IntRange(min=0), metavar="N",
    help="Number of the node; PET_NODE_RANK, JOB_COMPLETION_INDEX or 0 by default.",
)  # fmt: skip
@click.option("--checkpoints", metavar="PLACE", help="The disk.path of the policy, if it has one.")
@common
def keeper(console: Console, run_dir: str, node: int | None, checkpoints: str | None) -> None:
    """Hold a node's checkpoints in memory, in a container beside the training's.

    The keeper outlives a container whose processes are all killed. Both containers need the same
    user, run directory and XDG_RUNTIME_DIR. Ends after SIGTERM, when everything is written.
    """
    from autockpt.executors.keeper.launch import ensure_keeper, keeper_status, release_keeper
    from autockpt.run_directory import RunDirectory

    if node is None:
        node = number(os.environ, *COUNTS["node_rank"]) or 0
    path = os.path.abspath(run_dir)
    if os.path.isfile(path):
        raise ConfigError(f"--run-dir {run_dir}: is a file, expected a directory")
    place = checkpoints or str(RunDirectory(path).checkpoints())
    over = threading.Event()
    for announced in (signal.SIGTERM, signal.SIGINT):
        signal.signal(announced, lambda *_: over.set())
    told, run_id = 0, ""
    while not over.is_set():
        ensure_keeper(path, node, checkpoints=place, run_id=run_id)
        status = keeper_status(path, node)
        run_id = run_id or (status.run_id if status is not None else "")
        if status is not None and status.pid != told:
            told = status.pid
            console.say(f"keeper of node {node}: process {told}, checkpoints in {place}")
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # as process 1 of a container
                pass
        over.wait(LOOK_S)
    release_keeper(path, node, wait_s=DRAIN_S)
    console.object("keeper", {"node": node, "checkpoints": place})
