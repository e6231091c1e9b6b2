"""Who is in the simulated world: processes, memory, the shared directory, the rules played."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.machine import CoordinatorProtocol
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.protocol.node.machine import NodeProtocol
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention
from autockpt.values.redundancy import Redundancy

DEADLINES = Deadlines(
    resend_s=4.0,
    attach_s=200.0,
    knock_s=15.0,
    claim_s=3.0,
    inventory_s=40.0,
    restore_s=120.0,
    seal_s=30.0,
    commit_s=60.0,
    plan_s=15.0,
    plan_margin_steps=2,
    persist_attempts=2,
)


@dataclass(slots=True)
class Content:
    """Bytes of one shard: which state, of which rank, and where they came from."""

    generation: Generation
    history: int
    rank: int
    world: int = 0
    """Ranks that the state was divided among."""
    step: int = 0
    sealed: bool = False
    corrupt: bool = False
    nan: bool = False
    """Numbers in it are not sound; a seal does not always see it, a scrub does."""
    weights: bool = False
    """Its optimizer state was dropped: nothing trains on with it."""
    writer: "Trainer | None" = None
    shard: m.HeldShard | None = None
    sums: dict[int, int] = field(default_factory=dict)
    """Of a parity: by rank the history of the shard that was really added."""


@dataclass(slots=True, eq=False)
class Trainer:
    """One trainer process."""

    rank: int
    nodes: tuple[int, ...]
    """Node of every rank of its incarnation."""
    incarnation: m.Incarnation
    alive: bool = True
    running: bool = False
    refused: bool = False
    final: bool = False
    """Refused, and trying again will not help."""
    unseen: bool = False
    """Its keeper takes it for dead."""
    term: int | None = None
    emptied: bool = False
    """The directory of that term was emptied: another term may have its number."""
    attempt: int = 0
    lineage: tuple[m.TermParent, ...] = ()
    step: int = 0
    history: int = 0
    loaded: Content | None = None
    order: m.RestoreShard | None = None
    writing: list[tuple[Generation, int]] = field(default_factory=list)
    """(generation, slot) of the snapshots in flight."""
    told_discard: set[Generation] = field(default_factory=set)
    persisting: set[Generation] = field(default_factory=set)
    """On their way to storage, as far as it was told."""
    held: int = 0
    """Plan version prepared and without a verdict."""
    hold_step: int = 0
    """Last step it may stand at without a verdict."""
    wanted: tuple[int, dict[str, Any] | None] = (0, None)
    """(version, redundancy) of the newest prepared plan."""
    redundancy: Redundancy | None = None
    """Of the newest decided plan that names one."""
    decided: dict[int, int] = field(default_factory=dict)
    """Apply step by plan version."""
    plans: dict[int, int] = field(default_factory=dict)
    """Step at which each version was applied."""
    fitted: bool = True
    """Its slots have the size of its shards."""

    @property
    def node(self) -> int:
        """Where it runs."""
        return self.nodes[self.rank]


@dataclass(slots=True, eq=False)
class Node:
    """One machine: its memory and, while it lives, its keeper."""

    index: int
    slots: dict[tuple[int, int], Content | None] = field(default_factory=dict)
    """(rank, slot) -> content; survives while keeper or any trainer lives."""
    replicas: dict[tuple[int, int], Content] = field(default_factory=dict)
    """(rank, replica slot) -> copy of another node's shard; gone with the keeper."""
    parities: dict[tuple[int, int], Content] = field(default_factory=dict)
    """(rank, replica slot) -> the parity that the rank holds; gone with the keeper."""
    keeper: "Keeper | None" = None


@dataclass(slots=True, eq=False)
class Keeper:
    """One keeper process: the two machines and the work its runtime has in hand."""

    node: int
    machine: NodeProtocol
    coordinator: CoordinatorProtocol
    jobs: list[list[Any]] = field(default_factory=list)
    """[kind, stage, payload]: storage work, one small stage per action."""
    inbox: deque[m.NodeEvent] = field(default_factory=deque)
    """Events from local trainers, in order."""
    placed: m.ServeShards | None = None
    """Where shards are that trainers of this node gather."""
    names: set[tuple[int, Generation, int]] = field(default_factory=set)
    """Shard file names this keeper has asked for."""
    nan: set[Generation] = field(default_factory=set)
    """What its coordinator was told to be suspect when it was read back."""
    back: dict[int, int] = field(default_factory=dict)
    """By node whose trainers came back to a new keeper: losses so far when its coordinator heard of
    it."""
    bases: dict[int, Generation] = field(default_factory=dict)
    """By rank what its next shard file may be a difference to."""
    claimed: int = 0
    """Newest term that it has claimed; 0: none."""


@dataclass(slots=True)
class Commit:
    """One COMMIT on disk."""

    entry: m.CatalogueEntry
    synced: bool = False


@dataclass(slots=True)
class Disk:
    """The shared directory."""

    term: int = 0
    """Newest that was ever claimed."""
    claim: int = 0
    """Newest of which there is a file."""
    decisions: dict[int, Generation | None] = field(default_factory=dict)
    commits: dict[Generation, Commit] = field(default_factory=dict)
    files: dict[str, Content] = field(default_factory=dict)
    trashed: set[str] = field(default_factory=set)
    marked: bool = False


class Runtime:
    """Habits of a keeper's storage and transfers that the rules rely on; mutants break them."""

    def fenced_before_commit(self, disk: Disk, term: int) -> bool:
        """The check before COMMIT is linked."""
        return disk.claim > term

    def fenced_after_commit(self, disk: Disk, term: int) -> bool:
        """The check before anybody is told."""
        return disk.claim > term

    reads_before_claim = False
    """The directory is read first, and claimed then."""
    mixes = False
    """Whatever is sealed of a rank is added to a parity, of any generation."""
    rebuilds_from_fewer = False
    """What did not come counts as zeros, and is not compared with the digests of the lost."""


@dataclass(slots=True)
class Rules:
    """Which machines play; the mutants swap one."""

    node: Callable[..., NodeProtocol] = NodeProtocol
    coordinator: Callable[..., CoordinatorProtocol] = CoordinatorProtocol
    runtime: type[Runtime] = Runtime


def retention(rng: Random) -> Retention:
    """A policy for one seed."""
    return Retention(keep_last=rng.choice((1, 1, 2, 3)))
