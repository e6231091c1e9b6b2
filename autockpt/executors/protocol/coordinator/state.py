"""What a CoordinatorProtocol remembers, and the small helpers its parts share.  No rules here."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from autockpt.executors.protocol.admission import Admission
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.protocol.messages import (
    CatalogueEntry,
    CoordinatorInstruction,
    Health,
    HeldShard,
    Incarnation,
    InventoryReported,
    RankBegan,
    Record,
    Report,
    Send,
    TermParent,
    ToNode,
    TrainerAttached,
    brief,
)
from autockpt.executors.protocol.selection import Choice, Strike
from autockpt.executors.protocol.transitions import (
    CoordinatorPhase,
    DiskState,
    MemoryState,
    moved,
)
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention


@dataclass(slots=True)
class Save:
    """One generation of the open term on its way to memory and disk."""

    generation: Generation
    step: int
    began_s: float
    memory: MemoryState = "open"
    disk: DiskState = "none"
    disk_began_s: float = 0.0
    sealed: dict[int, HeldShard] = field(default_factory=dict)
    """By rank."""
    votes: dict[int, Record] = field(default_factory=dict)
    """By rank: sealed and persisted."""
    memory_only: set[int] = field(default_factory=set)
    """Ranks that began it for memory alone, and were not asked to write it since."""
    joining: set[int] = field(default_factory=set)
    """Ranks that were asked to write it as well: nobody is asked at every news of others."""
    compared: bool = False
    """Every rank's newest was compared with it: from now on only news can have passed it."""
    worst: Health | None = None
    """Of its shards, once it is memory-committed: they change no more."""

    def go_memory(self, state: MemoryState) -> None:
        """Change the state in memory, if the table has it."""
        moved("save in memory", self.memory, state)
        self.memory = state

    def go_disk(self, state: DiskState) -> None:
        """Change the state on disk, if the table has it."""
        moved("save on disk", self.disk, state)
        self.disk = state

    @property
    def finished(self) -> bool:
        """No verdict is outstanding."""
        return self.memory != "open" and self.disk in ("none", "durable", "dropped")


@dataclass(slots=True)
class Round:
    """Copies of one generation under way."""

    generation: Generation
    news_s: float
    """When it began, or something of a copy came last."""
    shards: dict[int, HeldShard]
    """By rank, as their owners sealed them, as far as that is known."""
    parities: dict[int, HeldShard] = field(default_factory=dict)
    """To be made, by the rank that holds it."""
    sealed: set[tuple[int, int]] = field(default_factory=set)
    """(rank, node that has a copy)."""
    encoded: set[int] = field(default_factory=set)
    """Ranks whose node has made the parity that they hold."""
    marks: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    """How far copies have come, by rank, node that fetches, and whether it is a parity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRanks:
    """Ranks of different nodes that hold parity of one another."""

    ranks: tuple[int, ...]
    losses: int


@dataclass(slots=True)
class Proposal:
    """A plan change between proposal and verdict."""

    version: int
    payload: dict[str, object]
    began_s: float
    prepared: dict[int, int] = field(default_factory=dict)
    """Step by rank."""


class CoordinatorState:
    """Fields and helpers of the coordinator role of one keeper."""

    def __init__(
        self, *, retention: Retention | None = None, deadlines: Deadlines | None = None
    ) -> None:
        self.retention = retention or Retention()
        self.deadlines = deadlines or Deadlines()
        self.now_s = 0.0
        self.resent_s = 0.0
        self.began_s = 0.0
        """When the current phase began."""
        self.phase: CoordinatorPhase = "idle"
        self.admission = Admission()
        self.knocking: dict[Incarnation, float] = {}
        """Since when another launch waits for the holder to be gone."""
        self.suspect: set[Generation] = set()
        """Not good for numbers in them, whatever the directory says: its mark may be lost."""
        self.failed: Counter[Generation] = Counter()
        """By generation in memory the starts that ended because it was bad, and all there was."""
        self._out: list[CoordinatorInstruction] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything about the incarnation, keep who held the run."""
        self.nodes: tuple[int, ...] = ()
        """By rank."""
        self.every_node: tuple[int, ...] = ()
        """Each of them once, ascending."""
        self.attaches: dict[int, TrainerAttached] = {}
        self.alive: set[int] = set()
        """Ranks that attached and were not reported lost."""
        self.unreachable: set[int] = set()
        """Nodes reported lost and not heard of since."""
        self.refusal = ("", False, False)
        """(reason, retryable, while restoring) that late ranks are told."""
        self.term = 0
        self.rejoining: int | None = None
        """The running term a new coordinator keeper continues."""
        self.catalogue: dict[Generation, CatalogueEntry] = {}
        self.parents: dict[int, Generation | None] = {}
        self.chain: tuple[TermParent, ...] = ()
        self.ever_durable = False
        """Something of this run was durable once, even if it is gone now."""
        self.inventory: dict[int, InventoryReported] = {}
        """By node."""
        self.struck: set[Strike] = set()
        self.attempt = 0
        self.choice: Choice | None = None
        """None: from scratch."""
        self.scratch = ""
        """Why nothing of an earlier start is resumed; "" where something is, or there was none."""
        self.verified: set[int] = set()
        self.memory_committed: Generation | None = None
        """Newest healthy one that all ranks hold."""
        self.wards: dict[int, tuple[int, ...]] = {}
        """By node the ranks of other nodes whose shards it copies."""
        self.sets: tuple[ParityRanks, ...] = ()
        """Every rank in one of them, where memory is protected by parity."""
        self.holders: dict[int, tuple[int, ...]] = {}
        """By node its ranks that hold a parity."""
        self.copies_wanted = 0
        """Shards that a round counts: every original, and every copy."""
        self.parities_wanted = 0
        self.round: Round | None = None
        self.protected: Generation | None = None
        """Newest one of which every copy was sealed."""
        self.intact = False
        """They still are, as far as is known."""
        self.saves: dict[Generation, Save] = {}
        self.begun: dict[int, RankBegan] = {}
        """News of the newest generation that each rank has begun."""
        self.floor: Generation | None = None
        """Saves up to here are settled and forgotten."""
        self.breakpoint = False
        """Every memory commit goes to disk: the end of this incarnation is near."""
        self.bare = False
        """The directory was made again, and nothing is in it: what is in memory goes there."""
        self.known_term = 0
        """Newest term that any node of the incarnation knew when it attached."""
        self.proposal: Proposal | None = None
        self.plan_newest = 0
        """Newest version ever proposed in this term."""
        self.plan_verdicts: dict[int, int | None] = {}
        """Apply step by version; None: dropped."""

    @property
    def incarnation(self) -> Incarnation | None:
        """Whose trainers this coordinator serves."""
        return self.admission.current

    @property
    def world_size(self) -> int:
        """Ranks of the incarnation."""
        return len(self.nodes)

    def settled_for(self, incarnation: Incarnation | None) -> bool:
        """The ranks of `incarnation` wait for no verdict from here.

        Those that another coordinator has admitted never do.
        """
        return incarnation != self.incarnation or all(s.finished for s in self.saves.values())

    def emit(self, *instructions: CoordinatorInstruction) -> None:
        """Add to the answer of the event being handled."""
        self._out.extend(instructions)

    def send(self, node: int, message: ToNode) -> None:
        """To one node."""
        self.emit(Send(to_node=node, message=message))

    def broadcast(self, message: ToNode) -> None:
        """To every node of the incarnation."""
        for node in self.every_node:
            self.send(node, message)

    def by_node(self, ranks: Iterable[int]) -> dict[int, list[int]]:
        """The nodes of `ranks`, each with those of them that live there."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.nodes[rank], []).append(rank)
        return found

    def accepts(self, generation: Generation) -> bool:
        """Rule 9: news about another term than the open one is from a zombie or late."""
        return self.phase == "running" and generation.term == self.term

    def stale(self, what: object) -> None:
        """Something older than the present arrived: ignore it, but say so."""
        self.emit(Report(kind="stale", detail=f"coordinator: ignored {brief(what)}"))

    def go(self, phase: CoordinatorPhase) -> None:
        """Change phase, if the table has it; its deadline starts now."""
        moved("coordinator", self.phase, phase)
        self.phase, self.began_s = phase, self.now_s

    def waited_s(self) -> float:
        """How long the current phase lasts."""
        return self.now_s - self.began_s
