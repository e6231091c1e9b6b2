"""In a pod: launch options from the variables that Kubernetes and Kubeflow set.

PET_NNODES, PET_NPROC_PER_NODE and their like are torchrun's options by its own rule.  The pods of a
TrainJob meet at PET_MASTER_ADDR and PET_MASTER_PORT.  JOB_COMPLETION_INDEX numbers the pods of an
Indexed Job or a JobSet.

Source: torch.distributed.run, "env" of its options; kubernetes.io, "Indexed Job".
"""

from collections.abc import Collection, Mapping
from typing import Any

from autockpt.launch.rank_env import number
from autockpt.values.errors import ConfigError

TEXTS = ("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf")
COUNTS: dict[str, tuple[str, ...]] = {
    "node_rank": ("PET_NODE_RANK", "JOB_COMPLETION_INDEX"),
    "max_restarts": ("PET_MAX_RESTARTS",),
}
MASTER_PORT = 29400
"""That of torchrun's own rendezvous, where no port is set."""


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
