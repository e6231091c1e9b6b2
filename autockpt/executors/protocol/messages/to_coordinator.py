"""Wire messages of nodes to the coordinator."""

from dataclasses import dataclass

from autockpt.executors.protocol.messages.facts import HeldShard, Incarnation, Record, TermParent
from autockpt.executors.protocol.messages.node_events import (
    BreakpointRequested,
    PlanLate,
    PlanPrepared,
    PlanProposed,
    TrainerAttached,
)
from autockpt.values.generation import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAttached:
    """A trainer attached at this node; repeated until the coordinator answers."""

    attach: TrainerAttached
    term: int = 0
    """Newest term that this node knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryReported:
    """All sealed shards in this node's memory, as of `term`; answer to InventoryWanted."""

    incarnation: Incarnation
    term: int
    held: tuple[HeldShard, ...]
    parities: tuple[HeldShard, ...] = ()
    protected: Generation | None = None
    """Whose slots it keeps."""
    copied: Generation | None = None
    """All that this node holds of it in a round is here, and the round's end is not known."""
    plan_version: int = 0
    """Newest plan version this node knows an apply step of; 0: none."""
    plan_apply_step: int = 0
    lineage: tuple[TermParent, ...] = ()
    """The lineage as the last opened term named it, for a directory that has forgotten it."""
    unbroken: bool = False
    """`term` was open here, and every trainer of it that lived on this node has ended since."""
    attempt: int = 0
    """Newest that a trainer of this node has named in any term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBegan:
    """A slot was granted (and a persist begun if `disk`)."""

    rank: int
    generation: Generation
    step: int
    disk: bool
    coming: tuple[Generation, ...] = ()
    """Older ones that this rank still seals, or has sealed without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSealed:
    """`shard` is sealed in memory; repeated until MemoryCommitted or GenerationDropped."""

    shard: HeldShard


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrepared:
    """Vote: `rank` sealed *and* persisted; repeated until a verdict."""

    rank: int
    generation: Generation
    step: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySealed:
    """A copy of `shard`, or that parity, is complete here; answer to CopiesWanted."""

    shard: HeldShard


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyComing:
    """A copy, or the parity, is on its way here; answer to CopiesWanted while it is."""

    owner: int
    """Rank whose shard it is, or who holds the parity."""
    generation: Generation
    mark: int
    """How far it has come; above 0, and comparable with earlier ones of the same copy only."""
    parity: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFailed:
    """This node will not have a copy, or the parity, of `generation` of `owner`."""

    owner: int
    """Rank whose shard it is, or who holds the parity."""
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDropped:
    """`rank` will never seal (`memory`) or never persist this generation."""

    rank: int
    generation: Generation
    reason: str
    memory: bool
    """True: no sealed shard either (skipped, torn); False: only the disk copy failed."""
    full: bool = False
    """There was no room for its file."""


Relayable = BreakpointRequested | PlanProposed | PlanPrepared | PlanLate
RELAYABLE: tuple[type, ...] = Relayable.__args__


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """An event of one node, passed on to the coordinator as it is."""

    incarnation: Incarnation
    """Whose trainers the node serves."""
    term: int
    """The term that is open at the node."""
    event: Relayable
