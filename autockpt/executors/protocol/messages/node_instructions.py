"""Instructions of a node: about its slots, its shards and its trainers."""

from dataclasses import dataclass
from typing import Any

from autockpt.executors.protocol.messages.facts import (
    Dispute,
    HeldShard,
    Incarnation,
    ShardCopy,
    ShardSource,
    TermParent,
)
from autockpt.values.generation import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantSlot:
    """Tell the trainer it may overwrite `slot`; answer: ShardSealed or ShardDiscarded."""

    rank: int
    generation: Generation
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipSave:
    """Tell the trainer to go on without saving; counted in telemetry, no answer."""

    rank: int
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardSnapshot:
    """Tell the trainer that the snapshot in flight is pointless.  It answers ShardDiscarded when
    it has stopped writing, or ShardSealed if it was just done; both free the slot."""

    rank: int
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPersist:
    """Write the shard in `slot` to storage, chunks as they arrive; the slot may not be sealed yet.

    Create the generation's directory if missing.  The file name contains `attempt` and must not
    exist.  If it does, answer PersistFailed and leave it alone: a vote of a dead keeper may name
    it.  Answer: ShardPersisted only after ShardSealed *and* fsync, or PersistFailed.
    """

    rank: int
    generation: Generation
    slot: int
    attempt: int
    """From 1; a new file for each, because a failed fsync is never repeated on the same file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortPersist:
    """Stop writing this shard and reading its slot *before* the next instruction; no answer.

    Only the unfinished file may be removed: an earlier one may be named by a vote or a commit.
    """

    rank: int
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchShard:
    """Bring `shard` from the memory of other nodes into a replica slot, verified.

    A shard comes whole from one node, or is rebuilt from shards and parities and compared with its
    own digests.  A parity is encoded from shards, and keeps their digests.  Every source is taken
    only with the root that `sources` names.  Answer: ShardFetched or FetchFailed.
    """

    shard: HeldShard
    """The shard as its owner sealed it; no other shard is accepted.  For parity, without its
    root."""
    sources: tuple[ShardCopy, ...]
    """One whole copy, or all that it is summed up from."""
    slot: int
    """Index among the replica slots of this rank; its parity has its own.  Memory is made
    when it is first used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortFetch:
    """Stop writing into this replica slot *before* the next instruction; no answer."""

    rank: int
    generation: Generation
    slot: int
    reason: str
    parity: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeShards:
    """Let trainers of this node read shards of `generation` from where `places` says they are.

    For orders of this attempt, which follow; a newer attempt replaces an older one.
    """

    term: int
    attempt: int
    generation: Generation
    places: tuple[ShardCopy, ...]
    rebuilt: tuple[int, ...] = ()
    """Ranks whose shards may be there a little later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOutgrown:
    """Make a rank's slot a replica slot: its shard is still needed, and new slots replace it."""

    rank: int
    slot: int
    replica_slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSlots:
    """Give the memory of all slots of `rank` back: it lives here no more, and they are passed."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeReplicas:
    """Give the memory of all replica slots of `rank` back; their contents are not needed."""

    rank: int
    parity: bool = False
    """The slots of its parity, else the ones of its shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceProtected:
    """Tell telemetry: `generation` survives the loss of a node; None: nothing does any more."""

    generation: Generation | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceDispute:
    """Tell this node's trainers, and write down, that replicas disagree."""

    generation: Generation
    dispute: Dispute


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceMemoryCommitted:
    """Tell local trainers and telemetry: `generation` survives the death of any trainer."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceDurable:
    """Tell local trainers and telemetry: `generation` is on disk; futures return now."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceDropped:
    """Tell local trainers and telemetry: `generation` will be nothing (or not durable)."""

    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRefused:
    """Tell the trainer it is not admitted, and why; it trains unprotected or exits."""

    rank: int
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceTrainer:
    """Tell a trainer of a replaced incarnation that it is fenced: no save, exit."""

    rank: int
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreShard:
    """Read and verify the shard of `generation` from `source` into the trainer.

    A newer attempt replaces an older one.  Answer: ShardVerified or ShardBad, same term, attempt.
    """

    rank: int
    term: int
    attempt: int
    generation: Generation
    step: int
    source: ShardSource
    readers: tuple[int, ...] = ()
    """Ranks of this node that read from storage in this attempt, ascending: they read together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRefused:
    """Tell the trainer nothing can be restored and why; it must not start from scratch."""

    rank: int
    incarnation: Incarnation
    reason: str
    retryable: bool = False
    """True: this incarnation broke (a rank was lost); a restart may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFresh:
    """Tell the trainer to start from scratch as `term`: its first save is (term, step)."""

    rank: int
    term: int
    reason: str = ""
    """Why nothing of an earlier start is resumed; "" where there was none."""
    lineage: tuple[TermParent, ...] = ()
    """As in TermOpened; a trainer names it to a new keeper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Tell the trainer all ranks hold `generation`: train on, as `term`, step counted from 0."""

    rank: int
    term: int
    generation: Generation
    step: int
    durable: bool = False
    """Something of this run is durable, `generation` or what came before it."""
    attempt: int = 0
    """Later checkpoints of the term have this attempt or a greater one."""
    lineage: tuple[TermParent, ...] = ()
    """As in TermOpened; a trainer names it to a new keeper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparePlan:
    """Hand the trainer a new plan.  Its *listening thread* answers PlanPrepared(step) at once.

    From then on the training loop waits before passing step `step` + `margin_steps` until
    ApplyPlan or AbortPlan comes; so `ApplyPlan` can never be late.  A newer version replaces one
    that is still held.
    """

    rank: int
    version: int
    payload: dict[str, Any]
    margin_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyPlan:
    """The trainer switches to plan `version` at the boundary of `apply_step`; ignores repeats."""

    rank: int
    version: int
    apply_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortPlan:
    """The trainer forgets plan `version`, unless it already has an apply step for it."""

    rank: int
    version: int
    reason: str
