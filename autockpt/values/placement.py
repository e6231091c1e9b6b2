"""WHO HOLDS WHOSE SHARD?  Nodes in cells, cells across failure domains.  Pure, equal on all nodes.

A placement is a list of disjoint *cells*, and memory survives a loss if every cell does:

* group: each member holds the shards of all; lost only if all are.  Source: Gemini (SOSP'23).
* ring: each member's shard is on it and the next `tolerates`; lost if more in a row are.
* parity: any `tolerates` members can be rebuilt from the rest (1: XOR; more: Reed-Solomon).

Nodes that share a rack or a power supply fail together.  So nodes are sorted by domain and dealt
one by one, like cards, to different cells.  A domain that has no more nodes than there are cells
has at most one in each.  Without known domains partners stand as far apart as they can.

After a loss only the cells that were hit are placed anew; all other nodes move no bytes.
"""

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autockpt.values.errors import ConfigError
from autockpt.values.redundancy import Redundancy


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureDomains:
    """Failure domains that nodes share and lose together.  Empty: not known."""

    levels: tuple[str, ...] = ()
    """Names of the shared domains, the largest first: power, rack, host."""
    labels: tuple[tuple[str, ...], ...] = ()
    """By node, one label for each level; nodes with the same label share that domain."""

    def __post_init__(self) -> None:
        for node, labels in enumerate(self.labels):
            if len(labels) != len(self.levels):
                raise ConfigError(
                    f"failure domains of node {node}: {len(labels)} labels, expected one for each "
                    f"of {', '.join(self.levels) or 'no level'}"
                )

    @classmethod
    def joined(cls, nodes: Sequence[Mapping[str, str]]) -> "FailureDomains":
        """Return the nodes' own labels (label by level, the largest first), joined.

        Levels that some node lacks are left out.
        """
        first = nodes[0] if nodes else {}
        levels = tuple(level for level in first if all(level in labels for labels in nodes))
        if not levels:
            return cls()
        labels = tuple(tuple(node[level] for level in levels) for node in nodes)
        return cls(levels=levels, labels=labels)

    def renumbered(self, numbers: Sequence[int]) -> "FailureDomains":
        """The same of nodes that are called `numbers`; others share nothing that has a name."""
        if not self.labels:
            return self
        known = dict(zip(numbers, self.labels, strict=True))
        nobody = ("",) * len(self.levels)
        labels = tuple(known.get(node, nobody) for node in range(max(numbers) + 1))
        return FailureDomains(levels=self.levels, labels=labels)

    def of(self, node: int) -> tuple[str, ...]:
        """Labels of a node, () where its domains are not known."""
        return self.labels[node] if node < len(self.labels) else ()

    def members(self, level: str) -> dict[str, tuple[int, ...]]:
        """Nodes by label of one level.  Raises ConfigError for an unknown level."""
        if level not in self.levels:
            known = ", ".join(self.levels) or "none"
            raise ConfigError(f"no failure domain is called {level!r}; known: {known}")
        column = self.levels.index(level)
        found: dict[str, list[int]] = {}
        for node, labels in enumerate(self.labels):
            found.setdefault(labels[column], []).append(node)
        return {label: tuple(nodes) for label, nodes in found.items()}


UNKNOWN_DOMAINS = FailureDomains()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Nodes that protect each other."""

    kind: Literal["group", "ring", "parity"]
    members: tuple[int, ...]
    """Distinct nodes; of a ring in its order."""
    tolerates: int
    """group and parity: members that may be lost; ring: members in a row that may be."""

    def survives(self, lost: Collection[int]) -> bool:
        """Whether the shards of all members can still be had without these nodes."""
        gone = [node in lost for node in self.members]
        if self.kind == "ring":
            runs = (len(list(run)) for is_gone, run in itertools.groupby(gone * 2) if is_gone)
            return max(runs, default=0) <= self.tolerates
        return sum(gone) <= self.tolerates

    def holders(self, node: int) -> tuple[int, ...]:
        """Nodes with a whole copy of a member's shard, itself first; with parity, it alone."""
        at, size = self.members.index(node), len(self.members)
        count = 0 if self.kind == "parity" else self.tolerates
        return tuple(self.members[(at + step) % size] for step in range(count + 1))

    def kept_by(self, node: int) -> tuple[int, ...]:
        """Members whose shards a member holds whole copies of, its own left out."""
        return tuple(m for m in self.members if m != node and node in self.holders(m))


@dataclass(frozen=True, kw_only=True)  # no slots: its index is made when it is first asked for
class Placement:
    """Every node in exactly one cell."""

    cells: tuple[Cell, ...]

    @functools.cached_property
    def _cell_by_node(self) -> dict[int, Cell]:
        return {node: cell for cell in self.cells for node in cell.members}

    @property
    def nodes(self) -> tuple[int, ...]:
        """All nodes, ascending."""
        return tuple(sorted(node for cell in self.cells for node in cell.members))

    def cell_of(self, node: int) -> Cell:
        """The cell of a node.  Raises ConfigError for a node without one."""
        if (cell := self._cell_by_node.get(node)) is not None:
            return cell
        raise ConfigError(f"node {node} is not placed; placed are {len(self.nodes)} nodes")

    def survives(self, lost: Collection[int]) -> bool:
        """Whether every shard can still be had from memory without these nodes.

        Looks at the cells of these nodes only: thousands of nodes cost what the lost ones do.
        """
        gone = frozenset(lost)
        hit = {id(cell): cell for node in gone if (cell := self._cell_by_node.get(node))}
        return all(cell.survives(gone) for cell in hit.values())


def place(
    redundancy: Redundancy,
    nodes: int | Sequence[int],
    domains: FailureDomains = UNKNOWN_DOMAINS,
) -> Placement:
    """Cells for nodes 0 .. `nodes` - 1, or for those given.

    Raises ConfigError where there are fewer nodes than the scheme needs, or where `group` does not
    divide them.
    """
    members = range(nodes) if isinstance(nodes, int) else nodes
    least = redundancy.tolerates + 1
    if len(members) < least:
        raise ConfigError(
            f"{len(members)} nodes cannot survive {least - 1} lost ones; it takes at least {least}"
        )
    # Stable: without domains the order of the nodes is kept.
    order = sorted(members, key=domains.of)
    if redundancy.parity:
        return _parity_sets(redundancy, order, domains)
    return _copies(redundancy, order, domains)


def repaired(
    placement: Placement,
    redundancy: Redundancy,
    lost: Collection[int],
    domains: FailureDomains = UNKNOWN_DOMAINS,
) -> Placement:
    """The placement without these nodes; cells that were not hit stay as they are.

    Survivors of broken cells form new ones; where they are too few for that, one more cell joins
    them.  A ring or a parity set that stays large enough goes on without the lost.
    Raises ConfigError as `place`.
    """
    intact: list[Cell] = []
    orphans: list[int] = []
    for cell in placement.cells:
        left = tuple(node for node in cell.members if node not in lost)
        if left == cell.members:
            intact.append(cell)
        elif cell.kind != "group" and len(left) > cell.tolerates + (cell.kind == "ring"):
            intact.append(Cell(kind=cell.kind, members=left, tolerates=cell.tolerates))
        else:
            orphans += left
    if not orphans and intact:
        return Placement(cells=tuple(intact))
    if joining := _joining(redundancy, orphans, intact):
        intact.remove(joining)
        orphans += joining.members
    anew = place(redundancy, sorted(orphans), domains)
    return Placement(cells=(*intact, *anew.cells))


def ranks_by_node(nodes: Sequence[int]) -> dict[int, list[int]]:
    """The ranks of every node; `nodes`: by rank."""
    found: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return found


def rank_sets(cell: Cell, here: Mapping[int, Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Every rank of a parity cell in one set, with at most one rank of a node.

    `here`: the ranks of every node.

    Ranks are dealt node by node to as many sets as the fullest node has ranks, so set sizes differ
    by at most one.  If these sets are too small, no others are large enough, because each rank of
    that node needs its own set.  Raises ConfigError there.
    """
    ranks = {node: here.get(node, ()) for node in cell.members}
    fullest = max(cell.members, key=lambda node: len(ranks[node]))
    sets: list[list[int]] = [[] for _ in ranks[fullest]]
    dealt = itertools.chain.from_iterable(ranks[node] for node in cell.members)
    for turn, rank in enumerate(dealt):
        sets[turn % len(sets)].append(rank)
    least = cell.tolerates + 1
    if any(len(each) < least for each in sets):
        most, all_ranks = len(ranks[fullest]), sum(map(len, ranks.values()))
        raise ConfigError(
            f"node {fullest} has {most} of the {all_ranks} ranks on nodes {list(cell.members)}. "
            f"Each needs {cell.tolerates} partners of its own on other nodes, so at least "
            f"{most * least} ranks. Give nodes like numbers of ranks, or use copies"
        )
    return tuple(tuple(each) for each in sets)


# --- parts ----------------------------------------------------------------------------------------


def _joining(redundancy: Redundancy, orphans: Sequence[int], intact: Sequence[Cell]) -> Cell | None:
    """The intact cell that takes part where the survivors of broken ones cannot stand alone.

    The ring goes first: with it the remainder may come out even, and there is one ring at most.
    """
    few = len(orphans) <= redundancy.tolerates
    if not few and len(orphans) % redundancy.copies == 0:
        return None
    ring = next((cell for cell in intact if cell.kind == "ring"), None)
    return ring or (min(intact, key=lambda c: len(c.members)) if few and intact else None)


def _copies(redundancy: Redundancy, order: list[int], domains: FailureDomains) -> Placement:
    """Groups of `copies`; where they do not divide the nodes, a last ring of the rest."""
    copies, count = redundancy.copies, len(order)
    rest = count % copies
    if redundancy.placement == "ring":
        return Placement(cells=(_ring(order, copies),))
    if rest and redundancy.placement == "group":
        raise ConfigError(
            f"groups of {copies} do not divide {count} nodes; nearest: placement mixed, or "
            f"{count - rest} nodes"
        )
    ringed: list[int] = []
    if rest:
        size = copies + rest
        ringed = [order[i * count // size] for i in range(size)]
    others = [node for node in order if node not in set(ringed)]
    groups = _deal(others, [copies] * (len(others) // copies), domains)
    cells = [Cell(kind="group", members=group, tolerates=copies - 1) for group in groups]
    return Placement(cells=(*cells, *([_ring(ringed, copies)] if ringed else [])))


def _ring(order: Sequence[int], copies: int) -> Cell:
    """Nodes next to each other in `order`, which share domains, stand `copies` apart."""
    seats = [seat for first in range(copies) for seat in range(first, len(order), copies)]
    seated = dict(zip(seats, order, strict=True))
    members = tuple(seated[seat] for seat in range(len(order)))
    return Cell(kind="ring", members=members, tolerates=copies - 1)


def _parity_sets(redundancy: Redundancy, order: list[int], domains: FailureDomains) -> Placement:
    """As few sets of at most `set_size` as it takes, of equal sizes but for one node."""
    count = len(order)
    sets = min(-(-count // redundancy.set_size), count // (redundancy.parity + 1))
    sizes = [count // sets + (k < count % sets) for k in range(sets)]
    return Placement(
        cells=tuple(
            Cell(kind="parity", members=members, tolerates=redundancy.parity)
            for members in _deal(order, sizes, domains)
        )
    )


def _deal(
    order: Sequence[int], sizes: Sequence[int], domains: FailureDomains
) -> list[tuple[int, ...]]:
    """Give out nodes one by one, each to the next cell in which its domains are met least.

    `known` remembers how well nodes of the same domains were served, and ends the search there.
    Dealing 4,096 nodes looks at few more cells than that.
    """
    cells: list[list[int]] = [[] for _ in sizes]
    known: dict[tuple[str, ...], tuple[int, ...]] = {}
    at = 0
    for node in order:
        labels = domains.of(node)
        enough = known.get(labels, (0,) * len(labels))
        best: tuple[tuple[int, ...], int] | None = None
        for step in range(len(cells)):
            index = (at + step) % len(cells)
            if len(cells[index]) == sizes[index]:
                continue
            met = _met(labels, cells[index], domains)
            if best is None or met < best[0]:
                best = (met, index)
            if met <= enough:
                break
        assert best is not None, "sizes sum up to the nodes"
        known[labels], chosen = best
        cells[chosen].append(node)
        at = chosen + 1
    return [tuple(cell) for cell in cells]


def _met(labels: tuple[str, ...], cell: Sequence[int], domains: FailureDomains) -> tuple[int, ...]:
    """By level, members of a cell that share that domain."""
    others = [domains.of(member) for member in cell]
    return tuple(
        sum(other[level : level + 1] == (label,) for other in others)
        for level, label in enumerate(labels)
    )
