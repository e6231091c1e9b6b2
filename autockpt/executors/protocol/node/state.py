"""What a NodeProtocol remembers, and the small helpers its parts share.  No rules live here."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from autockpt.executors.protocol.admission import Admission
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.protocol.messages import (
    Incarnation,
    NodeInstruction,
    RankBad,
    RankDropped,
    RankPlanPrepared,
    RankPrepared,
    RankVerified,
    Record,
    Report,
    RestoreOrdered,
    Send,
    ShardCopy,
    ShardsPlaced,
    TermParent,
    ToCoordinator,
    TrainerAttached,
    brief,
)
from autockpt.executors.protocol.node.slots import Slots
from autockpt.executors.protocol.selection import on_lineage
from autockpt.executors.protocol.transitions import NodePhase, moved
from autockpt.values.generation import Generation

Key = tuple[int, Generation]
"""(rank, generation)."""
Guest = tuple[int, bool]
"""(rank, whether it is the parity that the rank holds): what guest slots are for."""


@dataclass(slots=True)
class Persist:
    """One shard on its way to storage."""

    slot: int
    step: int
    attempt: int
    sealed: bool
    record: Record | None = None
    """Set when the file is complete; then the slot is free again."""
    stalled: bool = False
    """The storage hangs: a save that finds no other slot gets this one."""


@dataclass(slots=True, kw_only=True)
class Fetch:
    """A shard or parity on its way from other nodes into a guest slot."""

    slot: int
    generation: Generation
    sources: tuple[ShardCopy, ...]
    mark: int = 0
    """How far it has come; 0: nothing was heard of it."""


@dataclass(slots=True)
class LocalRank:
    """One rank whose slots are on this node, with or without a living trainer."""

    rank: int
    slots: Slots = field(default_factory=Slots)
    attach: TrainerAttached | None = None
    """Of the current incarnation; None: only its memory is here."""
    alive: bool = False
    refused: bool = False
    started: bool = False
    """Was told to train in the open term."""
    newest: Generation | None = None
    """Newest generation it asked for; anything not newer is a repeat."""
    order: RestoreOrdered | None = None
    answer: RankVerified | RankBad | None = None
    told: bool = False
    """The trainer was told to carry the order out."""
    plan_offered: int = 0
    """Version last handed to the trainer; 0: none."""
    plan_held: RankPlanPrepared | None = None
    """Prepared and without a verdict: the trainer holds."""


class NodeState:
    """Fields and helpers of one keeper's protocol."""

    def __init__(self, *, node: int = 0, deadlines: Deadlines | None = None) -> None:
        self.node = node
        """Index of this node; taken anew from every incarnation's `nodes`."""
        self.deadlines = deadlines or Deadlines()
        self.now_s = 0.0
        self.resent_s = 0.0
        self.phase: NodePhase = "idle"
        self.admission = Admission()
        self.nodes: tuple[int, ...] = ()
        self.coordinator = 0
        """The lowest of them: its keeper coordinates."""
        self.ranks: dict[int, LocalRank] = {}
        self.term = 0
        """Newest term heard of; everything older is fenced."""
        self.chain: tuple[TermParent, ...] = ()
        self.memory_committed: Generation | None = None
        """Newest healthy one that all ranks hold in memory."""
        self.durable: Generation | None = None
        self.unsettled: dict[Key, None] = {}
        """Sealed here, no verdict yet (an ordered set)."""
        self.wards: tuple[int, ...] = ()
        """Ranks of other nodes whose shards are copied here."""
        self.holders: tuple[int, ...] = ()
        """Ranks of this node that hold a parity."""
        self.guests: dict[Guest, Slots] = {}
        """What was fetched from other nodes, or made of it."""
        self.fetches: dict[Guest, Fetch] = {}
        self.placed: ShardsPlaced | None = None
        """Where the shards are that ranks of this node gather."""
        self.copying: Generation | None = None
        """Copies of it are being made somewhere: its slots are kept."""
        self.protected: Generation | None = None
        """Newest one that survives the loss of a node, or was restored: its slots are kept."""
        self.announced: Generation | None = None
        """What trainers were last told to be protected."""
        self.persists: dict[Key, Persist] = {}
        self.attempts: dict[Key, int] = {}
        """File names used so far; never reused, not even after a verdict."""
        self.votes: dict[Key, RankPrepared] = {}
        self.drops: dict[Key, RankDropped] = {}
        self.inventory_due: tuple[int, bool] | None = None
        """(term, rejoin) that could not be answered yet."""
        self.seen_term = 0
        """Newest term of a trainer that came back here, admitted or not."""
        self.plan_version = 0
        self.plan_apply_step = 0
        self._out: list[NodeInstruction] = []

    @property
    def incarnation(self) -> Incarnation | None:
        """Whose trainers are admitted."""
        return self.admission.current

    @property
    def settled(self) -> bool:
        """Nothing of the ranks here waits for a verdict."""
        return not (self.unsettled or self.votes or self.persists)

    def emit(self, *instructions: NodeInstruction) -> None:
        """Add to the answer of the event being handled."""
        self._out.extend(instructions)

    def tell(self, message: ToCoordinator) -> None:
        """Send to the keeper that coordinates the current incarnation."""
        if self.nodes:
            self.emit(Send(to_node=self.coordinator, message=message))

    def stale(self, what: object) -> None:
        """Something older than the present arrived: ignore it, but say so."""
        self.emit(Report(kind="stale", detail=f"node {self.node}: ignored {brief(what)}"))

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
        """What the open term began from."""
        return self.chain[0].parent if self.chain else None

    def is_current_or_parent(self, generation: Generation) -> bool:
        """It belongs to the open term, or is what that began from."""
        here = generation.term == self.term or generation == self.parent
        return self.phase == "open" and here

    def is_current(self, generation: Generation) -> bool:
        """The generation belongs to the term that is open here."""
        return self.phase == "open" and generation.term == self.term
