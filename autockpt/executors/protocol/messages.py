"""The vocabulary of the protocol: events, instructions, and what keepers say to one another.

Three families, told apart by what happens to them:

- *events* (past tense): the runtime saw something and calls `handle(event)` on a machine;
- *instructions* (imperative): a machine's answer, which the runtime carries out **in order**;
- *wire messages* (frozen nouns and participles): travel between `NodeProtocol` and
  `CoordinatorProtocol` inside `Send` and `MessageReceived`, also when both sit in one keeper.

Every keeper owns one NodeProtocol and one CoordinatorProtocol.  A received wire message goes to the
coordinator if its type is in `TO_COORDINATOR`, else to the node.  All may be lost, doubled or late:
machines repeat what is unanswered (on `TimePassed`) and ignore what they have seen.  Nothing here
reads a clock; the only time is `TimePassed.now_s`.  Only types live here, no rules.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

from autockpt.values import record as record_io
from autockpt.values.errors import ProtocolError
from autockpt.values.generation import Generation
from autockpt.values.placement import UNKNOWN_DOMAINS, FailureDomains
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy

Health = Literal["good", "suspect", "bad"]
"""Verdict on the numbers in a state; only `good` is chosen by itself and counts in retention."""
Record = dict[str, Any]
"""One shard file in a commit: JSON data, opaque here except the optional key `root`."""


# --------------------------------------------------------------------------- small nouns


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """One start of all trainers together: who asks for the run."""

    launch_id: str
    """Names one launcher start (`autockpt run`, `torchrun`); equal on all nodes of it."""
    restart_round: int
    """Rendezvous round within the launch, from 0; a higher one replaces a lower one at once."""

    def __str__(self) -> str:
        return f"{self.launch_id}#{self.restart_round}"


REPLICAS_DIFFER = "replicas differ"
"""Begin of the reason of a drop after which ranks stop to share what they hold alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareReading:
    """The digests of one share of replicated state, as one rank has read them."""

    share: int
    """Which of the shares, [0, number of members)."""
    digests: tuple[str, ...]
    """By section of the share the digest of every byte; empty text: this one was not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaProof:
    """What a shard says of the state that its rank shares with others of its node."""

    members: tuple[int, ...]
    """Ranks that must say the same, ascending."""
    digest: str
    """Of names and forms, and of a few elements of each tensor."""
    group: str = ""
    """Digest of the holders on all nodes and of the form; empty: nothing was read."""
    readings: tuple[ShareReading, ...] = ()
    """Of the share that this rank stores, and of shares that others store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispute:
    """Replicas that were equal to the bit are not equal any more."""

    ranks: tuple[int, ...]
    """The outvoted ranks; where no vote decides, all ranks of the difference."""
    named: bool
    """A majority of three or more decided."""
    nodes: tuple[int, ...]
    """Their nodes, ascending."""
    group: str = ""
    """Where it was seen first, as in `ReplicaProof`; empty: in a few elements of some tensor."""
    members: int = 0
    """Shares of that group."""
    share: int = 0
    section: int = 0

    @property
    def who(self) -> str:
        """The ranks, their nodes and the vote, for a person."""
        nodes = " and ".join(f"node {node}" for node in self.nodes)
        ranks = ", ".join(map(str, self.ranks))
        if not self.named:
            return f"ranks {ranks} ({nodes}) hold different values, and no third rank decides"
        if len(self.ranks) > 1:
            return f"ranks {ranks} ({nodes}) hold other values than most of the others"
        return f"rank {ranks} ({nodes}) holds other values than the others"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityMember:
    """One shard of a parity set, as its owner sealed it."""

    rank: int
    root: str
    layout_digest: str = ""
    bytes: int = 0
    health: Health = "good"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityOf:
    """What a parity is made of: one generation of a set of ranks, each on another node.

    Every member holds a parity of the others; equal values are parities of the same bytes.
    """

    members: tuple[ParityMember, ...]
    """In the order of the set."""
    losses: int
    """Members that may be lost, with what they hold."""

    def member(self, rank: int) -> ParityMember | None:
        """The shard of a rank, None when it is not in the set."""
        return next((member for member in self.members if member.rank == rank), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """One sealed shard in a slot of one node's memory; what inventories list."""

    rank: int
    slot: int
    generation: Generation
    step: int
    world_size: int
    """Ranks this generation was sealed by; shards of another world never fit together."""
    root: str
    """Root digest of the content; same generation and same root are the same bytes."""
    layout_digest: str = ""
    """Empty: unknown, matches every layout."""
    bytes: int = 0
    chunk_bytes: int = 0
    health: Health = "good"
    replicas: tuple[ReplicaProof, ...] = ()
    """Compared when the last rank has sealed; unknown of adopted memory."""
    copied: bool = False
    """Fetched from another node into a guest slot; guest slots are counted apart."""
    parity: ParityOf | None = None
    """Set: this is no shard, it is the parity that `rank` holds of the others of its set; `root`
    is the digest of the parity, empty while it is still to be made."""

    def of_member(self, rank: int) -> "HeldShard":
        """A shard that this parity was made of, as its owner sealed it."""
        member = self.parity.member(rank) if self.parity is not None else None
        assert member is not None
        return HeldShard(
            rank=rank, slot=0, generation=self.generation, step=self.step,
            world_size=self.world_size, root=member.root, layout_digest=member.layout_digest,
            bytes=member.bytes, chunk_bytes=self.chunk_bytes, health=member.health,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopy:
    """A shard, or a parity, in the memory of a node."""

    node: int
    shard: HeldShard


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """Where one rank reads its shard at restore."""

    kind: Literal["memory", "peer", "parity", "disk", "gather", "reshard"]
    """memory: a slot of this node; peer: a slot of `node`, fetched into a guest slot first; parity:
    rebuilt in a guest slot from what `pieces` names; disk: own file, or what else the commit lists
    if that is not enough.  Where the world size differs, gather: every shard from a memory that
    has it (`ShardsPlaced`), or its file; reshard: the files of the commit."""
    slot: int | None = None
    """Slot index, for memory."""
    copied: bool = False
    """It is a guest slot."""
    rebuilt: bool = False
    """It was just rebuilt there from parity."""
    node: int | None = None
    """Who has it, for peer."""
    shard: HeldShard | None = None
    """As its owner sealed it, for peer and parity."""
    pieces: tuple[ShardCopy, ...] = ()
    """For parity: the shards of its set that are left, and the parities of those that have both."""
    root: str = ""
    """Expected root digest (memory, peer, disk), empty if the commit names none."""
    records: tuple[Record, ...] = ()
    """disk: the one file of this rank."""

    @property
    def name(self) -> str:
        """What is struck out when it is bad: of several peers only those that were asked."""
        nodes = sorted({piece.node for piece in self.pieces})
        nodes += [] if self.node is None else [self.node]
        return " ".join([self.kind, *map(str, nodes)])

    @property
    def brought(self) -> tuple[ShardCopy, ...]:
        """What other nodes send for it; empty for what needs no other node."""
        if self.node is None or self.shard is None:
            return self.pieces
        return (ShardCopy(node=self.node, shard=self.shard),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """A lost shard that one node rebuilds from parity for all that gather it."""

    node: int
    source: ShardSource


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One committed generation on disk, as its COMMIT record says."""

    generation: Generation
    step: int
    world_size: int
    parent: Generation | None = None
    """Generation its term began from; None: from scratch."""
    records: tuple[Record, ...] = ()
    """Shard files, one per rank, in rank order."""
    layout_digests: tuple[str, ...] = ()
    """Per rank; empty tuple or empty string: unknown, matches every layout."""
    created_s: float = 0.0
    """When it was committed, seconds since 1970; used by `keep_every_s` only."""
    verified: bool = False
    """Read back and compared after the commit."""
    corrupt: bool = False
    """Read back and found different: never chosen, never counted."""
    quarantined: bool = False
    """A person set it aside: never chosen by itself, never counted, never deleted."""
    pinned: str = ""
    """The name under which a person keeps it: never deleted; "": it has none."""
    health: Health = "good"
    reshardable: bool = False
    """May be read by another number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermParent:
    """One decision on disk: the term continues the run from `parent`."""

    term: int
    parent: Generation | None
    """None: the term started from scratch."""
    attempt: int = 0
    """Above 0: the trainers began anew within the term (rule 21), which no record on disk says.
    Later checkpoints of the term have this attempt or a greater one."""


# --------------------------------------------------------------------------- events at a node


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
    """What nodes share and lose together.  Equal on all ranks."""
    layout_digest: str = ""
    """Empty: not known yet (optimizer state is still empty); then shards are not compared."""
    term: int | None = None
    """Set when a *running* trainer comes back to a new keeper: the term it trains in."""
    attempt: int = 0
    """Its newest attempt in that term."""
    resume_from: Generation | None = None
    """Explicit rollback: restore exactly this one.  Equal on all ranks."""
    fresh: bool = False
    """Start from scratch on purpose.  Equal on all ranks."""
    plan_version: int = 0
    """Newest plan version this trainer was told an apply step of; 0: none.  For re-attach."""
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
    """The rank is about to get other slots (`SlotsReplaced` follows); answer: KeepOutgrown for what
    is still needed.  `tight`: there is no memory for that beside the new ones."""

    rank: int
    tight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsReplaced:
    """The rank has `slots` new, empty slots; what the former ones held is gone."""

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
    """The guest slot named by `FetchShard` is complete, and every chunk matched the digests."""

    shard: HeldShard
    """`copied`, with the index of the guest slot; of a parity with its root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardComing:
    """What `FetchShard` named is not complete, and more of it is here; told every few seconds."""

    rank: int
    generation: Generation
    slot: int
    mark: int
    """Grows with what came: bytes; looks at it, where a trainer brings it."""
    parity: bool = False
    """It is to be the parity that `rank` holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """The shard could not be fetched; nothing writes into the guest slot any more."""

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


# ------------------------------------------------------------------- events at both machines


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """A wire message arrived from the keeper of `from_node` (maybe this very keeper)."""

    from_node: int
    message: "WireMessage"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """The keeper of `node` cannot be reached for longer than the runtime's grace time."""

    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """It is `now_s` by this keeper's monotonic clock; sent about once a second."""

    now_s: float


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


# --------------------------------------------------------------------- events at a coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class TermClaimed:
    """The directory is ours under `term`.  The catalogue was read *after* the claim stood."""

    incarnation: Incarnation
    term: int
    committed: tuple[CatalogueEntry, ...]
    """Every valid COMMIT on disk, of any term, made durable (fsync) before it was listed."""
    parents: tuple[TermParent, ...] = ()
    """Every decision record on disk, the newest attempt per term."""
    ever_committed: bool = False
    """Some generation was once durable, even if it is gone now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimWithdrawn:
    """No claim of this keeper stands above the term that WithdrawClaim named, and none will."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryRenewed:
    """The directory was empty and was made again under the claim of `term`: what was durable is
    gone."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryGone:
    """The claim of `term` is gone, and the directory cannot be made again now."""

    term: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TermRefused:
    """The directory is held by somebody alive, or cannot be read."""

    incarnation: Incarnation
    reason: str
    """Names the holder, for people."""
    failed: bool = False
    """No run holds it: the storage did not take the claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionWritten:
    """The decision record stands on disk, fsynced."""

    term: int
    attempt: int
    suspect: bool = False
    """The generation has that mark by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFailed:
    """The decision record could not be written, or a newer term exists (`fenced`)."""

    term: int
    attempt: int
    reason: str
    fenced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitWritten:
    """COMMIT is linked, fsynced, and the term was *still* the highest one afterwards."""

    generation: Generation
    created_s: float = 0.0
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFailed:
    """COMMIT may or may not stand on disk; it must not be called durable."""

    generation: Generation
    reason: str
    fenced: bool = False
    """True: a newer term exists, this coordinator must stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationVerified:
    """A committed generation was read back: all digests match (`ok`), or not."""

    generation: Generation
    ok: bool
    health: Health = "good"
    """Verdict on all the numbers in it; a seal may have looked at a part of them."""
    detail: str = ""


# --------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Bring `message` to the keeper of `to_node`; to this keeper itself by a local queue."""

    to_node: int
    message: "WireMessage"


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
    """Tell the trainer the snapshot in flight is pointless; it answers ShardDiscarded when it
    has stopped writing (or ShardSealed if it was just done; both free the slot)."""

    rank: int
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPersist:
    """Write the shard in `slot` to storage, chunks as they arrive; the slot may not be sealed yet.

    Create the generation's directory if missing; the file name contains `attempt` and must not
    exist (if it does, answer PersistFailed and leave it alone: a vote of a dead keeper may name
    it).  Answer: ShardPersisted only after ShardSealed *and* fsync, or PersistFailed.
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
    """Bring `shard` from the memory of other nodes into a guest slot, verified.

    A shard comes whole from one node, or is rebuilt from shards and parities and compared with its
    own digests.  A parity is encoded from shards, and keeps their digests.  Every source is taken
    only with the root that `sources` names.  Answer: ShardFetched or FetchFailed.
    """

    shard: HeldShard
    """As its owner sealed it: nothing else is taken for it.  Of a parity without its root."""
    sources: tuple[ShardCopy, ...]
    """One whole copy, or all that it is summed up from."""
    slot: int
    """Index among the guest slots of this rank, those of its parity counted apart; memory is made
    when it is first used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortFetch:
    """Stop writing into this guest slot *before* the next instruction; no answer."""

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
    """Make a rank's slot a guest slot: its shard is still needed, and new slots take its place."""

    rank: int
    slot: int
    guest_slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSlots:
    """Give the memory of all slots of `rank` back: it lives here no more, and they are passed."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeGuests:
    """Give the memory of all guest slots of `rank` back; nobody needs what is in them."""

    rank: int
    parity: bool = False
    """Those of its parity, else those of its shard."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTerm:
    """Claim the directory.  Answer: TermClaimed or TermRefused.

    `term` None: create the next term file.  A number: the same incarnation goes on with a new
    keeper; answer TermClaimed with that number if it is still the highest, else TermRefused.
    Refused as well if this keeper has let another incarnation in meanwhile: a claim that comes late
    would fence what replaced it.
    """

    incarnation: Incarnation
    term: int | None
    after: int = 0
    """Newest term that any keeper knows, where an emptied directory does not: this is newer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawClaim:
    """Make sure that no claim ordered so far will ever stand.  Answer: ClaimWithdrawn.

    No answer where a claim above `term` stands already, or may be standing: it is being linked.
    """

    incarnation: Incarnation
    term: int
    """Newest that this keeper claimed, as far as the coordinator knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDecision:
    """Write decisions/t-<term> (replacing an older attempt), fsync.  Answer: Decision*.

    Check for a newer term file before *and* after, and answer `fenced` if there is one.  Then look
    whether the generation was marked as suspect since the directory was claimed.  Then trash what
    earlier terms left without a COMMIT.
    """

    term: int
    attempt: int
    generation: Generation | None
    """None: from scratch."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCommit:
    """Check the term, write COMMIT, fsync, link, fsync, check the term *again*.

    Answer: CommitWritten, or CommitFailed (fenced if either check found a newer term).
    """

    generation: Generation
    step: int
    world_size: int
    parent: Generation | None
    records: tuple[Record, ...]
    """In rank order, [world_size]."""
    layout_digests: tuple[str, ...]
    health: Health


@dataclass(frozen=True, slots=True, kw_only=True)
class TrashGeneration:
    """Move the generation's directory to trash, *unless it contains a COMMIT*; no answer."""

    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyGeneration:
    """Read the committed generation back in the background.  Answer: GenerationVerified."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteGenerations:
    """Delete these commits (guarded; term checked first; COMMIT unlinked first); no answer."""

    term: int
    generations: tuple[Generation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkEverCommitted:
    """Leave a durable mark that something was durable once; repeated is harmless."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Something a person may want to know; telemetry and log, once per text."""

    kind: Literal["stale", "fenced", "refused", "warning", "violation"]
    detail: str


# ------------------------------------------------------------- wire messages: node -> coordinator


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
    plan_version: int = 0
    """Newest plan version this node knows an apply step of; 0: none."""
    plan_apply_step: int = 0
    lineage: tuple[TermParent, ...] = ()
    """As it was told when the last term opened, for a directory that has forgotten it."""
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


# ------------------------------------------------------------- wire messages: coordinator -> node


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryWanted:
    """Report what you hold; everything older than `term` is fenced from now on.

    `rejoin`: a new coordinator keeper continues a running term; nothing is fenced.
    """

    incarnation: Incarnation
    term: int
    rejoin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOrdered:
    """Rank `rank` restores `generation` from `source`."""

    incarnation: Incarnation
    rank: int
    term: int
    attempt: int
    generation: Generation
    step: int
    source: ShardSource
    readers: tuple[int, ...] = ()
    fetching: tuple[int, ...] = ()
    """Ranks of this node whose shards are fetched from peers first.  All ranks of a node wait for
    them: what ranks of a node hold alike is stored by one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsPlaced:
    """Where the shards of `generation` are; ahead of orders to gather, and repeated with those.

    One message for all nodes: they may be thousands, and so may the shards.
    """

    incarnation: Incarnation
    term: int
    attempt: int
    generation: Generation
    places: tuple[ShardCopy, ...]
    """Every memory that has one, or will have when it is rebuilt; the files have the others."""
    rebuilt: tuple[int, ...] = ()
    """Ranks whose shards are not there yet: a node rebuilds them from parity."""
    rebuilds: tuple[Rebuild, ...] = ()
    """By which node, and out of what."""

    def rebuilds_at(self, node: int) -> tuple[ShardSource, ...]:
        """The shards that one node rebuilds."""
        return tuple(each.source for each in self.rebuilds if each.node == node)


@dataclass(frozen=True, slots=True, kw_only=True)
class TermOpened:
    """All ranks hold `parent` (None: scratch); trainers that wait start, running ones go on.

    Also the answer to a running trainer that came back to a new keeper.
    """

    incarnation: Incarnation
    term: int
    parent: Generation | None
    step: int
    parent_durable: bool
    """`parent` is a commit on disk, so older slots need not be kept."""
    lineage: tuple[TermParent, ...]
    """Chain of parents, newest first; slots off it are garbage."""
    memory_committed: Generation | None = None
    durable: Generation | None = None
    wards: tuple[int, ...] = ()
    """Ranks of other nodes whose shards this node copies."""
    holders: tuple[int, ...] = ()
    """Ranks of this node that hold a parity."""
    protected: Generation | None = None
    """Its slots are kept until something newer is protected; None: nothing is."""
    plan_version: int = 0
    plan_apply_step: int = 0
    ever_durable: bool = False
    """Something of this run is durable, `parent` or what came before it."""
    scratch: str = ""
    """Why nothing of an earlier start is resumed; "" where something is, or there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCommitted:
    """All ranks sealed `generation`.  Said again when it turns out to be suspect."""

    generation: Generation
    health: Health = "good"
    dispute: Dispute | None = None
    """Why it is suspect, where replicas of the state disagree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesWanted:
    """Fetch your wards' shards of `generation`, encode your parities, keep your own.

    Repeated until CopiesEnded.
    """

    generation: Generation
    shards: tuple[HeldShard, ...] = ()
    """Of the wards of the node that this is sent to."""
    parities: tuple[HeldShard, ...] = ()
    """To be made by the node that this is sent to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesEnded:
    """The round of copies of `generation` is over: all hold theirs (`protected`), or it failed."""

    generation: Generation
    protected: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableCommitted:
    """`generation` is committed on disk."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDropped:
    """`generation` will never be memory-committed (`memory`) or never be durable."""

    generation: Generation
    reason: str
    memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistWanted:
    """Persist the shards of `ranks`; repeated until a verdict.

    Of those that began it for memory alone while others write it, of all in a breakpoint save.
    """

    generation: Generation
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TermFenced:
    """A newer term exists: stop every save of `term`."""

    incarnation: Incarnation
    term: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOffered:
    """Phase one of a plan change."""

    incarnation: Incarnation
    term: int
    version: int
    payload: dict[str, Any]
    margin_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDecided:
    """Phase two: every rank prepared `version`; it applies at `apply_step`."""

    term: int
    version: int
    apply_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDropped:
    """Plan `version` never applies."""

    term: int
    version: int
    reason: str


# --------------------------------------------------------------------------- families

ToCoordinator = (
    RankAttached
    | TrainerLost
    | InventoryReported
    | RankBegan
    | RankSealed
    | RankPrepared
    | CopySealed
    | CopyComing
    | CopyFailed
    | RankDropped
    | ShardVerified
    | ShardBad
    | Relayed
)
ToNode = (
    AttachRefused
    | RestoreRefused
    | InventoryWanted
    | RestoreOrdered
    | ShardsPlaced
    | TermOpened
    | MemoryCommitted
    | CopiesWanted
    | CopiesEnded
    | DurableCommitted
    | GenerationDropped
    | PersistWanted
    | TermFenced
    | PlanOffered
    | PlanDecided
    | PlanDropped
)
WireMessage = ToCoordinator | ToNode
TO_COORDINATOR: tuple[type, ...] = ToCoordinator.__args__
"""Wire message types that go to the CoordinatorProtocol of the receiving keeper."""
TO_NODE: tuple[type, ...] = ToNode.__args__
"""Wire message types that go to the NodeProtocol of the receiving keeper."""

NodeEvent = (
    TrainerAttached
    | TrainerLost
    | SlotsAdopted
    | SlotsOutgrown
    | SlotsReplaced
    | SlotsAdded
    | SaveRequested
    | ShardSealed
    | ShardDiscarded
    | ShardPersisted
    | PersistFailed
    | PersistStalled
    | ShardFetched
    | ShardComing
    | FetchFailed
    | ShardVerified
    | ShardBad
    | BreakpointRequested
    | PlanPrepared
    | PlanLate
    | PlanProposed
    | MessageReceived
    | NodeLost
    | TimePassed
)
CoordinatorEvent = (
    TermClaimed
    | TermRefused
    | ClaimWithdrawn
    | DirectoryRenewed
    | DirectoryGone
    | DecisionWritten
    | DecisionFailed
    | CommitWritten
    | CommitFailed
    | GenerationVerified
    | PlanProposed
    | MessageReceived
    | NodeLost
    | TimePassed
)
NodeInstruction = (
    Send
    | GrantSlot
    | SkipSave
    | DiscardSnapshot
    | StartPersist
    | AbortPersist
    | FetchShard
    | AbortFetch
    | ServeShards
    | KeepOutgrown
    | FreeSlots
    | FreeGuests
    | AnnounceProtected
    | AnnounceDispute
    | AnnounceMemoryCommitted
    | AnnounceDurable
    | AnnounceDropped
    | AttachRefused
    | FenceTrainer
    | RestoreShard
    | RestoreRefused
    | StartFresh
    | Resume
    | PreparePlan
    | ApplyPlan
    | AbortPlan
    | Report
)
CoordinatorInstruction = (
    Send
    | ClaimTerm
    | WithdrawClaim
    | WriteDecision
    | WriteCommit
    | TrashGeneration
    | VerifyGeneration
    | DeleteGenerations
    | MarkEverCommitted
    | Report
)
Instruction = NodeInstruction | CoordinatorInstruction

_BY_NAME: dict[str, type] = {kind.__name__: kind for kind in (*TO_COORDINATOR, *TO_NODE)}


MOST_RANKS = 2**20
"""Of a job, as a wire message may name them: far beyond any, and no list that fills the memory."""


def message_to_data(message: WireMessage) -> dict[str, Any]:
    """JSON data of a wire message: {"type": class name, "body": its fields}."""
    if isinstance(message, RankAttached):
        return {"type": "RankAttached", "body": _attached_to_data(message)}
    if isinstance(message, Relayed):
        event = {"type": type(message.event).__name__, "body": record_io.to_data(message.event)}
        head = record_io.to_data(message.incarnation)
        return {
            "type": "Relayed", "body": {"incarnation": head, "term": message.term, "event": event},
        }  # fmt: skip
    return {"type": type(message).__name__, "body": record_io.to_data(message)}


def _attached_to_data(message: RankAttached) -> dict[str, Any]:
    """The nodes of all ranks as runs: every rank sends them, so plain they would be N * N."""
    body: dict[str, Any] = record_io.to_data(
        replace(message, attach=replace(message.attach, nodes=()))
    )
    body["attach"]["nodes"] = [list(run) for run in _node_runs(message.attach.nodes)]
    return body


@functools.lru_cache(maxsize=4)
def _node_runs(nodes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """(first node, nodes, ranks of each): nodes that follow one another with as many ranks each."""
    runs: list[tuple[int, int, int]] = []
    for node, here in itertools.groupby(nodes):
        ranks = len(list(here))
        first, count, each = runs[-1] if runs else (0, 0, 0)
        if (first + count, each) == (node, ranks):
            runs[-1] = (first, count + 1, each)
        else:
            runs.append((node, 1, ranks))
    return tuple(runs)


@functools.lru_cache(maxsize=4)
def _nodes_of(runs: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    """Node by rank, the same object for the same runs: then they are equal at a glance."""
    found: list[int] = []
    for first, nodes, ranks in runs:
        for node in range(first, first + nodes):
            found += [node] * ranks
    return tuple(found)


def _read_runs(data: Any) -> tuple[int, ...]:
    """Raises ProtocolError for what no sender writes."""
    runs: list[tuple[int, int, int]] = []
    for run in data if isinstance(data, list) else [data]:
        whole = isinstance(run, list) and len(run) == 3 and all(type(n) is int for n in run)
        if not whole or run[0] < 0 or min(run[1:]) < 1:
            raise ProtocolError(f"no run of nodes [first, nodes, ranks of each]: {str(run)[:80]}")
        runs.append((run[0], run[1], run[2]))
    ranks = sum(nodes * each for _, nodes, each in runs)
    if ranks > MOST_RANKS:
        raise ProtocolError(f"a job of {ranks} ranks; at most {MOST_RANKS} are expected")
    return _nodes_of(tuple(runs))


def message_from_data(data: Any) -> WireMessage:
    """The wire message of `message_to_data`.  Raises ProtocolError or ConfigError if it is none."""
    kind = _BY_NAME.get(str(data.get("type"))) if isinstance(data, dict) else None
    if kind is None or set(data) != {"type", "body"}:
        raise ProtocolError(f"no wire message of this version: {str(data)[:80]!r}")
    body = data["body"]
    if kind is RankAttached and isinstance(body, dict) and isinstance(body.get("attach"), dict):
        nodes = _read_runs(body["attach"].get("nodes"))
        body = {**body, "attach": {**body["attach"], "nodes": []}}
        read = record_io.from_data(RankAttached, body, where="RankAttached")
        return replace(read, attach=replace(read.attach, nodes=nodes))
    if kind is Relayed:
        return _relayed_from_data(body)
    message: WireMessage = record_io.from_data(kind, body, where=kind.__name__)
    return message


@dataclass(frozen=True, slots=True, kw_only=True)
class _RelayedFrame:
    """A `Relayed` whose event is not read yet: it is tagged, because two kinds look alike."""

    incarnation: Incarnation
    term: int
    event: dict[str, Any]


def _relayed_from_data(body: Any) -> Relayed:
    """Raises ProtocolError or ConfigError for a body that no sender writes."""
    frame = record_io.from_data(_RelayedFrame, body, where="Relayed")
    kind = next((k for k in RELAYABLE if k.__name__ == frame.event.get("type")), None)
    if kind is None or set(frame.event) != {"type", "body"}:
        raise ProtocolError(f"no event that a node relays: {str(frame.event)[:80]!r}")
    event: Relayable = record_io.from_data(kind, frame.event["body"], where=kind.__name__)
    return Relayed(incarnation=frame.incarnation, term=frame.term, event=event)


def brief(what: object) -> str:
    """Return a short name of an event or message, e.g. `RankSealed rank 3 step 40 (term 2)`."""
    parts = [type(what).__name__ if not isinstance(what, str) else what]
    rank, generation = getattr(what, "rank", None), getattr(what, "generation", None)
    parts += [f"rank {rank}"] if rank is not None else []
    parts += [str(generation)] if generation is not None else []
    return " ".join(parts)
