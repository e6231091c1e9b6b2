"""Failures on a clock: drawn from rates with bursts in failure domains, or taken from a trace.

A history belongs to the cluster and not to a strategy; all strategies meet the same one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autockpt.values.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One interruption of the job."""

    at_s: float
    nodes: tuple[int, ...] = ()
    """Nodes whose memory is lost; none: processes died, every node's memory is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The failures of a cluster from 0 to `length_s`."""

    length_s: float
    nodes: int
    failures: tuple[Failure, ...]
    """Oldest first."""
    outages: tuple[tuple[float, float], ...] = ()
    """(start, end) s in which more nodes are down than there are spares; disjoint, in order."""

    @property
    def failures_per_s(self) -> float:
        """Interruptions per second of wall time."""
        return len(self.failures) / self.length_s

    @property
    def process_share(self) -> float:
        """Fraction of interruptions that every node's memory survives."""
        alive = sum(1 for failure in self.failures if not failure.nodes)
        return alive / len(self.failures) if self.failures else 0.0


def together(histories: Sequence[History]) -> tuple[float, ...]:
    """How many of the failures of nodes took 1, 2, 3 and at least 4; () where there were none."""
    sizes = [len(f.nodes) for history in histories for f in history.failures if f.nodes]
    counted = tuple(float(sum(min(4, size) == k for size in sizes)) for k in range(1, 5))
    return counted if sizes else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A cluster as its failures see it."""

    nodes: int
    mtbf_s: float
    """Mean time between interruptions of the whole job; a burst counts as one."""
    process_share: float
    """Fraction of interruptions in which processes die and no node's memory is lost."""
    domain_nodes: int = 16
    """Nodes that share a rack, a switch or a power supply."""
    burst_share: float = 0.0
    """Fraction of the node failures that take several nodes of one domain."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.domain_nodes < 1:
            raise ConfigError(
                f"{self.nodes} nodes in domains of {self.domain_nodes}: both must be at least 1"
            )
        if not (self.mtbf_s > 0 and math.isfinite(self.mtbf_s)):
            raise ConfigError(f"an MTBF of {self.mtbf_s} s: must be more than 0 s and finite")
        for name, share in (("process", self.process_share), ("burst", self.burst_share)):
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{name} share of {share:g}: must be between 0 % and 100 %")


def draw(world: World, *, length_s: float, seed: int, run: int = 0) -> History:
    """A Poisson history of wall time; the same world, length, seed and run give the same one.

    A burst takes a second node of the domain, and each further one with probability 1/2.
    """
    chance = np.random.default_rng((seed, run))
    count = int(chance.poisson(length_s / world.mtbf_s))
    times = np.sort(chance.random(count)) * length_s
    alive = chance.random(count) < world.process_share
    first = chance.integers(world.nodes, size=count)
    bursts = chance.random(count) < world.burst_share
    more = chance.geometric(0.5, size=count)
    failures = []
    for at_s, survives, node, burst, extra in zip(
        times.tolist(), alive.tolist(), first.tolist(), bursts.tolist(), more.tolist(), strict=True
    ):
        hit = () if survives else _hit(world, node, extra if burst else 0, chance)
        failures.append(Failure(at_s=at_s, nodes=hit))
    return History(length_s=length_s, nodes=world.nodes, failures=tuple(failures))


def _hit(world: World, node: int, extra: int, chance: np.random.Generator) -> tuple[int, ...]:
    if not extra:
        return (node,)
    start = node - node % world.domain_nodes
    others = [n for n in range(start, min(start + world.domain_nodes, world.nodes)) if n != node]
    if not others:
        return (node,)
    taken = chance.choice(others, size=min(extra, len(others)), replace=False).tolist()
    return tuple(sorted((node, *taken)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Down:
    """One line of a trace: a node is out of service; without a node only processes died."""

    node: int | None
    start_s: float
    end_s: float


def from_trace(
    downs: Iterable[Down],
    *,
    nodes: int,
    spares: int | None,
    length_s: float,
    window_s: float = 60.0,
) -> History:
    """The history of a trace: starts within `window_s` of the first of them are one failure.

    `nodes` counts the job's nodes.  A spare replaces a node that is out.  With `spares` None there
    is always one; else the job waits while more than `spares` are out.
    """
    ordered = sorted((d for d in downs if d.start_s < length_s), key=lambda d: d.start_s)
    failures: list[Failure] = []
    for down in ordered:
        hit = () if down.node is None else (down.node,)
        if failures and down.start_s - failures[-1].at_s <= window_s:
            merged = tuple(sorted({*failures[-1].nodes, *hit}))
            failures[-1] = Failure(at_s=failures[-1].at_s, nodes=merged)
        else:
            failures.append(Failure(at_s=down.start_s, nodes=hit))
    outages = () if spares is None else _outages(ordered, spares, [f.at_s for f in failures])
    return History(length_s=length_s, nodes=nodes, failures=tuple(failures), outages=outages)


def _outages(
    downs: Sequence[Down], spares: int, failures_s: Sequence[float]
) -> tuple[tuple[float, float], ...]:
    """Where more than `spares` nodes are out, from the failure that brought it about."""
    changes = [(d.start_s, 1) for d in downs if d.node is not None]
    changes += [(d.end_s, -1) for d in downs if d.node is not None]
    out, since, found = 0, 0.0, []
    for at_s, change in sorted(changes):
        before, out = out, out + change
        if before <= spares < out:
            since = max(t for t in failures_s if t <= at_s)
        elif out <= spares < before and at_s > since:
            found.append((since, at_s))
    return tuple(found)
