"""The state of a NodeProtocol, and the small helpers that its parts share.  No rules live here."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.admission import Admission
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.protocol.node.slots import Slots
from autockpt.executors.protocol.selection import on_lineage
from autockpt.executors.protocol.transitions import NodePhase, moved
from autockpt.values.generation import Generation

Key = tuple[int, Generation]
"""(rank, generation)."""
Replica = tuple[int, bool]
"""(rank, whether it is the parity that the rank holds): what replica slots are for."""


@dataclass(slots=True)
class Persist:
    """One shard on its way to storage."""

    slot: int
    step: int
    attempt: int
    sealed: bool
    record: m.Record | None = None
    """Set when the file is complete; then the slot is free again."""
    stalled: bool = False
    """The storage hangs: a save that finds no other slot gets this one."""


@dataclass(slots=True, kw_only=True)
class Fetch:
    """A shard or parity on its way from other nodes into a replica slot."""

    slot: int
    generation: Generation
    sources: tuple[m.ShardCopy, ...]
    parity: m.ParityOf | None = None
    """The shards that the parity is made of; None: it is a shard."""
    mark: int = 0
    """The progress of the fetch; 0: no report yet."""


@dataclass(slots=True)
class LocalRank:
    """One rank whose slots are on this node, with or without a living trainer."""

    rank: int
    slots: Slots = field(default_factory=Slots)
    attach: m.TrainerAttached | None = None
    """The attach of the current incarnation; None: only its memory is here."""
    alive: bool = False
    refused: bool = False
    started: bool = False
    """The node has sent it the order to train in the open term."""
    newest: Generation | None = None
    """Newest generation it asked for; anything not newer is a repeat."""
    order: m.RestoreOrdered | None = None
    answer: m.ShardVerified | m.ShardBad | None = None
    told: bool = False
    """The node has sent the order to the trainer."""
    plan_offered: int = 0
    """Version last handed to the trainer; 0: none."""
    plan_held: m.PlanPrepared | None = None
    """Prepared and without a verdict: the trainer holds."""


def replica_of(shard: m.HeldShard) -> Replica:
    """Return the rank, and which of its two kinds of copies it is."""
    return shard.rank, shard.parity is not None


@dataclass(slots=True, kw_only=True)
class NodeState:
    """All that one keeper's protocol remembers; its parts share it."""

    node: int = 0
    """Index of this node; taken anew from every incarnation's `nodes`."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    now_s: float = 0.0
    resent_s: float = 0.0
    phase: NodePhase = "idle"
    admission: Admission = field(default_factory=Admission)
    nodes: tuple[int, ...] = ()
    coordinator: int = 0
    """The lowest of them: its keeper coordinates."""
    ranks: dict[int, LocalRank] = field(default_factory=dict)
    term: int = 0
    """Newest term heard of; everything older is fenced."""
    chain: tuple[m.TermParent, ...] = ()
    memory_committed: Generation | None = None
    """Newest healthy one that all ranks hold in memory."""
    durable: Generation | None = None
    unsettled: dict[Key, None] = field(default_factory=dict)
    """Sealed here, no verdict yet (an ordered set)."""
    replicated: tuple[int, ...] = ()
    """Ranks of other nodes whose shards are copied here."""
    holders: tuple[int, ...] = ()
    """Ranks of this node that hold a parity."""
    replicas: dict[Replica, Slots] = field(default_factory=dict)
    """Shards fetched from other nodes, and parities made of them."""
    fetches: dict[Replica, Fetch] = field(default_factory=dict)
    placed: m.ShardsPlaced | None = None
    """Where the shards are that ranks of this node gather."""
    copying: Generation | None = None
    """Copies of it are being made somewhere: its slots are kept."""
    asked: tuple[m.HeldShard, ...] = ()
    """The parities that its round asks of this node."""
    protected: Generation | None = None
    """Newest one that survives the loss of a node, or was restored: its slots are kept."""
    announced: Generation | None = None
    """The newest generation reported to trainers as protected."""
    persists: dict[Key, Persist] = field(default_factory=dict)
    attempts: dict[Key, int] = field(default_factory=dict)
    """File names used so far; never reused, not even after a verdict."""
    votes: dict[Key, m.RankPrepared] = field(default_factory=dict)
    drops: dict[Key, m.RankDropped] = field(default_factory=dict)
    inventory_due: tuple[int, bool] | None = None
    """(term, rejoin) that could not be answered yet."""
    open_term: int = 0
    """Term that was open here last, with every rank of this node; 0: this keeper saw none."""
    lingering: set[tuple[int, m.Incarnation]] = field(default_factory=set)
    """Trainers of starts that were replaced, which have not ended yet."""
    newest_attempt: int = 0
    """Newest that a trainer here has named in any term."""
    seen_term: int = 0
    """Newest term of a trainer that came back here, admitted or not."""
    plan_version: int = 0
    plan_apply_step: int = 0
    out: list[m.NodeInstruction] = field(default_factory=list)
    """Instructions for the event that is handled now."""

    @property
    def incarnation(self) -> m.Incarnation | None:
        """Whose trainers are admitted."""
        return self.admission.current

    @property
    def settled(self) -> bool:
        """Nothing of the ranks here waits for a verdict."""
        return not (self.unsettled or self.votes or self.persists)

    def emit(self, *instructions: m.NodeInstruction) -> None:
        """Add to the answer of the event being handled."""
        self.out.extend(instructions)

    def tell(self, message: m.ToCoordinator) -> None:
        """Send to the keeper that coordinates the current incarnation."""
        if self.nodes:
            self.emit(m.Send(to_node=self.coordinator, message=message))

    def relay(self, event: m.Relayable) -> None:
        """Pass an event on to the coordinator of the current incarnation."""
        if self.incarnation is not None:
            self.tell(m.Relayed(incarnation=self.incarnation, term=self.term, event=event))

    def stale(self, what: object) -> None:
        """Something older than the present arrived: ignore it, but say so."""
        self.emit(m.Report(kind="stale", detail=f"node {self.node}: ignored {m.brief(what)}"))

    def go(self, phase: NodePhase) -> None:
        """Change phase, if the table has it."""
        moved("node", self.phase, phase)
        self.phase = phase

    def living(self) -> Iterator[LocalRank]:
        """Ranks of the current incarnation whose trainer is alive and was not refused."""
        return (r for r in self.ranks.values() if r.alive and not r.refused)

    def is_eligible(self, generation: Generation) -> bool:
        """It was not left behind by a restore of an older one."""
        return on_lineage(generation, self.chain)

    @property
    def parent(self) -> Generation | None:
        """The generation that the open term began from."""
        return self.chain[0].parent if self.chain else None

    def is_current_or_parent(self, generation: Generation) -> bool:
        """It belongs to the open term, or is what that began from."""
        parent = self.phase == "open" and generation == self.parent
        return parent or self.is_current(generation)

    @property
    def first_attempt(self) -> int:
        """Least attempt of the checkpoints of the trainers that run."""
        return self.chain[0].attempt if self.chain else 0

    def all_attached(self) -> bool:
        """Every rank of this node, by the incarnation that is admitted."""
        here = [rank for rank, node in enumerate(self.nodes) if node == self.node]
        return all(rank in self.ranks and self.ranks[rank].attach is not None for rank in here)

    def is_current(self, generation: Generation) -> bool:
        """The generation belongs to the term that is open here."""
        here = generation.term == self.term and generation.attempt >= self.first_attempt
        return self.phase == "open" and here
