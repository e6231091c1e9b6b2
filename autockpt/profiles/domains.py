"""Failure domains that nodes share, from a cluster's description.  Texts in, labels out.

There are two kinds of sources.  Tables of all nodes are a CSV or YAML file, or Slurm's
topology.conf.  A node's own knowledge (an environment variable, SLURM_TOPOLOGY_ADDR) is exchanged
when a job starts.  Levels stand largest first: a power supply before its racks, a core switch
before its leaves.
"""

import csv
from collections.abc import Mapping, Sequence
from typing import Any

from autockpt.profiles.imports.node_list import expand
from autockpt.values.errors import ConfigError
from autockpt.values.placement import FailureDomains

Labels = Mapping[str, str]
"""Label by level, largest level first."""
Table = Mapping[str, Labels]
"""Labels by node name."""

DEEPEST = 16
"""Levels of switches; more is a loop."""


def of_nodes(names: Sequence[str], table: Table, *, where: str) -> FailureDomains:
    """The domains of a job's nodes, in its order; names may be full or short.

    Raises ConfigError naming the nodes that the table does not have.
    """
    short = {name.partition(".")[0]: labels for name, labels in table.items()}
    found = [table.get(name) or short.get(name.partition(".")[0]) for name in names]
    missing = [name for name, labels in zip(names, found, strict=True) if not labels]
    if missing:
        raise ConfigError(
            f"{where}: no failure domain of {', '.join(missing[:5])}"
            f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}; the file names "
            f"{len(table)} nodes, and every node of the job needs a line"
        )
    return FailureDomains.joined([labels for labels in found if labels])


# --- what one node knows --------------------------------------------------------------------------


def of_variable(text: str) -> Labels:
    """`power=p1,rack=r7`.  Raises ConfigError for anything else."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    labels = {level.strip(): label.strip() for level, _, label in pairs}
    if not labels or not all(labels) or not all(labels.values()) or len(labels) < len(pairs):
        raise ConfigError(f"failure domains {text[:80]!r}: expected e.g. power=p1,rack=r7")
    return labels


def of_slurm_address(address: str, pattern: str) -> Labels:
    """Switches above this node, from SLURM_TOPOLOGY_ADDR and SLURM_TOPOLOGY_ADDR_PATTERN.

    `core1.leaf3.node17` with `switch.switch.node`.  Empty without a topology plugin, whose address
    is the node alone.  Source: sbatch's manual, output environment variables.
    """
    parts, kinds = address.split("."), pattern.split(".")
    if len(parts) != len(kinds):
        return {}
    switches = [part for part, kind in zip(parts, kinds, strict=True) if kind == "switch"]
    return _heights(switches)


# --- tables ---------------------------------------------------------------------------------------


def from_csv(text: str, *, where: str) -> Table:
    """`node,power,rack` and a line for each node (or list of nodes, as `node[01-16]`, quoted)."""
    rows = [
        (number, [cell.strip() for cell in next(csv.reader([line]))])
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not rows or rows[0][1][0] != "node" or len(rows[0][1]) < 2:
        raise ConfigError(f"{where}: expected the header node,LEVEL,..., e.g. node,power,rack")
    levels = rows[0][1][1:]
    table: dict[str, Labels] = {}
    for number, cells in rows[1:]:
        if len(cells) != len(levels) + 1 or not all(cells):
            raise ConfigError(
                f"{where}:{number}: {len(cells)} cells, expected {len(levels) + 1}: "
                f"node,{','.join(levels)}"
            )
        _add(table, cells[0], dict(zip(levels, cells[1:], strict=True)), f"{where}:{number}")
    return table


def from_data(data: Any, *, where: str) -> Table:
    """A mapping `node01: {power: p1, rack: r7}`, as YAML gives it."""
    if not isinstance(data, dict) or not all(isinstance(row, dict) for row in data.values()):
        raise ConfigError(f"{where}: expected nodes with their domains: node01: {{rack: r7}}")
    table: dict[str, Labels] = {}
    for names, row in data.items():
        labels = {str(level): str(label) for level, label in row.items()}
        _add(table, str(names), labels, where)
    return table


def from_topology_conf(text: str, *, where: str) -> Table:
    """Slurm's topology.conf: switches over switches over nodes, or blocks of nodes.

    Source: slurm.schedmd.com/topology.conf.html, plugins topology/tree and topology/block.
    """
    above: dict[str, str] = {}
    table: dict[str, Labels] = {}
    leaves: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = _entry(line)
        if not entry:
            continue
        place = f"{where}:{number}"
        name = entry.get("switchname") or entry.get("blockname")
        if name is None:
            continue  # BlockSizes and the like
        for child in _expanded(entry.get("switches", ""), place):
            above[child] = name
        for node in _expanded(entry.get("nodes", ""), place):
            if "blockname" in entry:
                _add(table, node, {"block": name}, place)
            leaves[node] = name
    if not leaves:
        raise ConfigError(f"{where}: no line SwitchName=... Nodes=... or BlockName=... Nodes=...")
    for node, leaf in leaves.items():
        if node not in table:
            table[node] = _heights(_way_up(leaf, above, where)[::-1])
    return table


def _entry(line: str) -> dict[str, str]:
    words = line.partition("#")[0].split()
    return {key.lower(): value for key, _, value in (word.partition("=") for word in words)}


def _expanded(names: str, place: str) -> tuple[str, ...]:
    try:
        return expand(names)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def _add(table: dict[str, Labels], names: str, labels: Labels, place: str) -> None:
    for name in _expanded(names, place):
        if name in table:
            raise ConfigError(f"{place}: node {name} stands twice")
        table[name] = labels


def _way_up(leaf: str, above: Mapping[str, str], where: str) -> list[str]:
    """A leaf switch and the switches over it."""
    way = [leaf]
    while way[-1] in above:
        way.append(above[way[-1]])
        if len(way) > DEEPEST:
            raise ConfigError(f"{where}: switch {leaf} is above itself: {' < '.join(way[:4])}")
    return way


def _heights(switches: Sequence[str]) -> Labels:
    """Switches, the highest first, named by their height over the node: leaves have 1."""
    return {f"switch{len(switches) - k}": name for k, name in enumerate(switches)}
