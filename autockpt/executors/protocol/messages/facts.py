"""Nouns of the protocol: incarnations, shards, copies, parities, entries of a catalogue."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from autockpt.values.generation import Generation

Health = Literal["good", "suspect", "bad"]
"""Verdict on the numbers in a state; only `good` is chosen by itself and counts in retention."""
Record = dict[str, Any]
"""One shard file in a commit: JSON data, opaque here except the optional key `root`."""
REPLACES = "replaces"
"""Key of the record of a shard of weights: the record of the whole one, which may still come back.
"""


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
    """The number of the share, [0, number of members)."""
    digests: tuple[str, ...]
    """By section of the share the digest of every byte; empty text: this one was not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaProof:
    """Proof of the state that a rank shares with others, as its shard has it."""

    members: int
    """Number of the ranks that must say the same."""
    among: str
    """Digest of these ranks: a list in each seal would grow with the square of their number."""
    digest: str
    """Digest of names and forms, and of a few elements of each tensor."""
    group: str = ""
    """Digest of the holders on all nodes and of the form; empty: nothing was read."""
    readings: tuple[ShareReading, ...] = ()
    """Readings of the share that this rank stores, and of shares that others store."""


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
    """Members of a parity: one generation of a set of ranks, each on another node.

    Every member holds a parity of the others; equal values are parities of the same bytes.
    """

    members: tuple[ParityMember, ...]
    """In the order of the set."""
    losses: int
    """Members that may be lost, with their shards."""

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
    across_nodes: bool = False
    """Its rank needs shards of other nodes, too."""
    health: Health = "good"
    replicas: tuple[ReplicaProof, ...] = ()
    """Compared when the last rank has sealed."""
    proofs_known: bool = True
    """False: adopted or rebuilt, and `replicas` is empty even where its rank shares."""
    copied: bool = False
    """A replica, fetched from another node; replicas have slot numbers of their own."""
    parity: ParityOf | None = None
    """Set: this is the parity that `rank` holds of the others of its set, and no shard.  `root`
    is the digest of the parity, empty until it is made."""

    def of_member(self, rank: int) -> "HeldShard":
        """A shard that this parity was made of, as its owner sealed it."""
        member = self.parity.member(rank) if self.parity is not None else None
        assert member is not None
        return HeldShard(
            rank=rank, slot=0, generation=self.generation, step=self.step,
            world_size=self.world_size, root=member.root, layout_digest=member.layout_digest,
            bytes=member.bytes, chunk_bytes=self.chunk_bytes, health=member.health,
            proofs_known=False,
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
    """memory: a slot of this node.  peer: a slot of `node`, fetched into a replica slot first.
    parity: rebuilt in a replica slot from `pieces`.  disk: its own file, or other files of the
    commit if that is not enough.  Where the world size differs, gather: every shard from a memory
    that has it (`ShardsPlaced`), or its file; reshard: the files of the commit.  Ranks whose node
    has not all of their state gather, too."""
    slot: int | None = None
    """Slot index, for memory."""
    copied: bool = False
    """It is a replica slot."""
    rebuilt: bool = False
    """It was just rebuilt there from parity."""
    node: int | None = None
    """The node that has it, for peer."""
    shard: HeldShard | None = None
    """The shard as its owner sealed it, for peer and parity."""
    pieces: tuple[ShardCopy, ...] = ()
    """For parity: the remaining shards of its set, and the parities of members that have both."""
    root: str = ""
    """Expected root digest (memory, peer, disk), empty if the commit names none."""
    records: tuple[Record, ...] = ()
    """disk: the one file of this rank."""

    @property
    def name(self) -> str:
        """The source to strike out when it is bad: of several peers only the asked ones."""
        nodes = sorted({piece.node for piece in self.pieces})
        nodes += [] if self.node is None else [self.node]
        return " ".join([self.kind, *map(str, nodes)])

    @property
    def brought(self) -> tuple[ShardCopy, ...]:
        """The copies that other nodes send for it; empty if no other node is needed."""
        if self.node is None or self.shard is None:
            return self.pieces
        return (ShardCopy(node=self.node, shard=self.shard),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """A lost shard that one node rebuilds from parity for all that gather it."""

    node: int
    source: ShardSource


def holds_weights_only(records: Iterable[Record]) -> bool:
    """Whether the shards of a commit were written again without optimizer state: all or none."""
    return any(record.get("weights_only") for record in islice(records, 1))


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

    @property
    def weights_only(self) -> bool:
        """Optimizer state was dropped: nothing can be resumed from its files."""
        return holds_weights_only(self.records)


@dataclass(frozen=True, slots=True, kw_only=True)
class TermParent:
    """One decision on disk: the term continues the run from `parent`."""

    term: int
    parent: Generation | None
    """None: the term started from scratch."""
    attempt: int = 0
    """Above 0: the trainers began anew within the term (rule 21), which no record on disk says.
    Later checkpoints of the term have this attempt or a greater one."""
