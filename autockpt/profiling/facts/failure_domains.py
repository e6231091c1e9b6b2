"""Where this cluster says what its nodes share: a file, a variable, Slurm.

        AUTOCKPT_DOMAINS=domains.csv            a table of all nodes: .csv, .yaml or topology.conf
        AUTOCKPT_DOMAINS=power=p1,rack=r7       this node's own domains
        SLURM_TOPOLOGY_ADDR                     switches above this node, set by topology/tree

This module reads files and the environment.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from autockpt import yaml_text
from autockpt.profiles import domains
from autockpt.profiles.imports.node_list import expand
from autockpt.values.errors import ConfigError
from autockpt.values.placement import UNKNOWN_DOMAINS, FailureDomains

VARIABLE = "AUTOCKPT_DOMAINS"


def own_labels(environment: Mapping[str, str]) -> domains.Labels:
    """Domains of this node by its own knowledge; empty where nothing says.  Nodes exchange them.

    Raises ConfigError for a variable that is neither a file nor labels.
    """
    said = environment.get(VARIABLE, "")
    if said and not _is_file(said):
        return domains.of_variable(said)
    return domains.of_slurm_address(
        environment.get("SLURM_TOPOLOGY_ADDR", ""),
        environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""),
    )


def domains_of(names: Sequence[str], environment: Mapping[str, str]) -> FailureDomains | None:
    """Domains of all nodes of a job from the table that the variable names; None: there is none."""
    said = environment.get(VARIABLE, "")
    if not said or not _is_file(said):
        return None
    return domains.of_nodes(names, read_table(said), where=said)


def job_domains(
    environment: Mapping[str, str], nodes: int
) -> tuple[FailureDomains, tuple[str, ...]]:
    """Return the domains of a Slurm job's nodes from the table of the variable, and any error.

    Unknown where nothing says: a training does not end because of it.
    """
    try:
        names = expand(environment.get("SLURM_JOB_NODELIST", ""))
        found = domains_of(names, environment) if len(names) == nodes > 1 else None
    except (ConfigError, ValueError) as error:
        return UNKNOWN_DOMAINS, (f"failure domains are not known: {error}",)
    return found or UNKNOWN_DOMAINS, ()


def read_table(path: str) -> domains.Table:
    """The table in a file, in the format that its name and content say.

    Raises ConfigError where it cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"failure domains {path}: cannot be read: {error}") from None
    if path.endswith((".yaml", ".yml")):
        return domains.from_data(yaml_text.load(text, path), where=path)
    if path.endswith(".conf"):
        return domains.from_topology_conf(text, where=path)
    return domains.from_csv(text, where=path)


def _is_file(said: str) -> bool:
    """A file by its name: labels have a `=`, and a path that has one is written with a slash."""
    return "=" not in said or "/" in said
