"""Events at a node: of its trainers, its slots and its disk."""

from dataclasses import dataclass
from typing import Any

from autockpt.executors.protocol.messages.facts import (
    Health,
    HeldShard,
    Incarnation,
    Record,
    ReplicaProof,
    TermParent,
)
from autockpt.values.generation import Generation
from autockpt.values.placement import UNKNOWN_DOMAINS, FailureDomains
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerAttached:
    """A trainer connected to its keeper and asks to be restored (or, with `term`, goes on).

    A rank whose slots this keeper has not seen is preceded by `SlotsAdopted`.
    """

    rank: int
    incarnation: Incarnation
    world_size: int
    nodes: tuple[int, ...]
    """Node index of every rank, [world_size]; the smallest one's keeper coordinates."""
    slots: int
    """Slots this rank has on this node."""
    redundancy: Redundancy = NO_REDUNDANCY
    """How memory is protected against the loss of nodes.  Equal on all ranks."""
    domains: FailureDomains = UNKNOWN_DOMAINS
    """Failure domains that nodes share.  Equal on all ranks."""
    layout_digest: str = ""
    """Empty: not known yet (optimizer state is still empty); then shards are not compared."""
    term: int | None = None
    """Set when a *running* trainer comes back to a new keeper: the term it trains in."""
    attempt: int = 0
    """Its newest attempt in that term."""
    lineage: tuple[TermParent, ...] = ()
    """The lineage of that term, as its opening named it: no keeper or directory may know it now."""
    resume_from: Generation | None = None
    """Explicit rollback: restore exactly this one.  Equal on all ranks."""
    fresh: bool = False
    """Start from scratch on purpose.  Equal on all ranks."""
    plan_version: int = 0
    """Newest plan version whose apply step this trainer knows; 0: none.  For re-attach."""
    plan_apply_step: int | None = None
    """That step, passed or still to come; None: in force since the start."""
    plan_held: int = 0
    """Newer version it has prepared and waits for a verdict on; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLost:
    """A trainer process is dead (pidfd or socket closed): it writes no slot any more."""

    rank: int
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsAdopted:
    """A new keeper took over the memory of `rank`: these slots are sealed, all others empty.

    The runtime has made sure that no trainer is still writing into any of them.
    """

    rank: int
    slots: int
    """How many slots there are, sealed or not."""
    held: tuple[HeldShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsOutgrown:
    """The rank is about to get other slots (`SlotsReplaced` follows).  Answer: KeepOutgrown for
    each shard that is still needed.  `tight`: there is no memory for that beside the new ones."""

    rank: int
    tight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsReplaced:
    """The rank has `slots` new, empty slots; the former ones are gone with their contents."""

    rank: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsAdded:
    """The rank has `slots` slots now: the former ones keep their shards, the new ones are empty."""

    rank: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequested:
    """The trainer stands at the boundary of `generation` and wants to save it."""

    rank: int
    generation: Generation
    step: int
    disk: bool = False
    """True: also make it durable; chunks stream to storage while the slot fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSealed:
    """The slot granted for `generation` is complete, compared and will not change any more."""

    rank: int
    generation: Generation
    root: str
    bytes: int = 0
    chunk_bytes: int = 0
    layout_digest: str = ""
    across_nodes: bool = False
    health: Health = "good"
    replicas: tuple[ReplicaProof, ...] = ()
    held: bool = True
    """Its slot holds it; False: it streamed through, and its file alone does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDiscarded:
    """The snapshot is torn and its writer has stopped.  Only sent instead of ShardSealed."""

    rank: int
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPersisted:
    """The shard file (and its directory entry) is written, fsynced and closed."""

    rank: int
    generation: Generation
    attempt: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFailed:
    """The shard file could not be written; what this attempt made of it is removed, and the slot
    is read no more."""

    rank: int
    generation: Generation
    attempt: int
    reason: str
    retryable: bool = True
    full: bool = False
    """There was no room for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistStalled:
    """Nothing of the shard file was written for long: memory may have the slot when it needs it."""

    rank: int
    generation: Generation
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFetched:
    """The replica slot named by `FetchShard` is complete, and every chunk matched the digests."""

    shard: HeldShard
    """`copied`, with the index of the replica slot; of a parity with its root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardComing:
    """The shard of `FetchShard` is not complete, and more of it is here; sent every few seconds."""

    rank: int
    generation: Generation
    slot: int
    mark: int
    """Grows with what came: bytes; looks at it, where a trainer brings it."""
    parity: bool = False
    """It is to be the parity that `rank` holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """The shard could not be fetched; nothing writes into the replica slot any more."""

    rank: int
    generation: Generation
    slot: int
    reason: str
    final: bool = False
    """True: asking again is in vain (the other node does not have it, or there is no memory)."""
    parity: bool = False
    """It was to be the parity that `rank` holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardVerified:
    """The shard named by `RestoreShard` is in the trainer and every chunk matched."""

    rank: int
    term: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBad:
    """The source named by `RestoreShard` is missing, unreadable or does not match."""

    rank: int
    term: int
    attempt: int
    detail: str
    unread: bool = False
    """An object store does not answer now, which says nothing about the checkpoint."""
    lost: int | None = None
    """Of shards that are gathered, the rank whose shard no memory has whole: damaged, or gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakpointRequested:
    """The end is near (SIGTERM, preemption notice): make the newest memory commit durable."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrepared:
    """The trainer holds the new plan and will not pass step `step` + margin before an answer."""

    rank: int
    version: int
    step: int
    """Step the trainer stood at when it answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLate:
    """`ApplyPlan` named a step the trainer had passed: it did not hold as it promised."""

    rank: int
    version: int
    step: int


STOP_VERSION = 2**40
"""From this version on a proposal is of the last step, not of a plan.  It is decided as a plan is,
at the first boundary that all ranks can still meet, and no plan comes behind it."""
STOP_MARGIN_STEPS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProposed:
    """The tuner wants a new plan; delivered to any one machine of the incarnation."""

    version: int
    """Grows by at least 1 per proposal within an incarnation; >= 1.  `STOP_VERSION`: of a stop."""
    payload: dict[str, Any]
    """The plan, or why the ranks stop, as JSON data; opaque here."""
