"""The state of a CoordinatorProtocol, and the helpers that its parts share.  No rules here."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.admission import Admission
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.protocol.selection import Choice, Strike, chain_from
from autockpt.executors.protocol.transitions import (
    CoordinatorPhase,
    DiskState,
    MemoryState,
    moved,
)
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention
from autockpt.values.redundancy import Redundancy


@dataclass(slots=True)
class Save:
    """One generation of the open term on its way to memory and disk."""

    generation: Generation
    step: int
    began_s: float
    memory: MemoryState = "open"
    disk: DiskState = "none"
    disk_began_s: float = 0.0
    sealed: dict[int, m.HeldShard] = field(default_factory=dict)
    """By rank."""
    votes: dict[int, m.Record] = field(default_factory=dict)
    """By rank: sealed and persisted."""
    memory_only: set[int] = field(default_factory=set)
    """Ranks that began it for memory alone, and were not asked to write it since."""
    joining: set[int] = field(default_factory=set)
    """Ranks that were asked to write it as well, so that news of other ranks does not ask them
    again."""
    compared: bool = False
    """Every rank's newest was compared with it: from now on only news can have passed it."""
    worst: m.Health | None = None
    """The worst health of its shards, once it is memory-committed: they change no more."""
    dispute: m.Dispute | None = None
    """Replicas of the state disagree."""
    drop_reason: str = ""
    """Why it was dropped, for news that comes later."""

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
    shards: dict[int, m.HeldShard]
    """By rank, as their owners sealed them, as far as that is known."""
    parities: dict[int, m.HeldShard] = field(default_factory=dict)
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


@dataclass(slots=True, kw_only=True)
class HeldTerm:
    """A term whose trainers have ended, as the coordinator that ran it knows it."""

    incarnation: m.Incarnation
    nodes: tuple[int, ...]
    term: int
    attempt: int
    """The attempt of the newest decision."""
    parents: dict[int, Generation | None]
    parts: tuple[m.TermParent, ...]
    catalogue: dict[Generation, m.CatalogueEntry]
    ever_durable: bool
    commits: dict[Generation, m.CatalogueEntry]
    """Ordered, and not known to stand: they may, or may yet."""
    plan_verdicts: dict[int, int | None]
    plan_newest: int


_KEPT = {
    "held",
    "retention", "deadlines", "now_s", "resent_s", "began_s", "phase", "admission", "knocking",
    "suspect", "failed", "out",
}  # fmt: skip
"""Fields that outlive an incarnation."""


@dataclass(slots=True, kw_only=True)
class CoordinatorState:
    """All that the coordinator role of one keeper remembers; its parts share it."""

    retention: Retention = field(default_factory=Retention)
    deadlines: Deadlines = field(default_factory=Deadlines)
    now_s: float = 0.0
    resent_s: float = 0.0
    began_s: float = 0.0
    """When the current phase began."""
    phase: CoordinatorPhase = "idle"
    admission: Admission = field(default_factory=Admission)
    knocking: dict[m.Incarnation, float] = field(default_factory=dict)
    """Since when another launch waits for the holder to be gone."""
    suspect: set[Generation] = field(default_factory=set)
    """Suspect by the numbers in them; the mark in the directory may be lost."""
    failed: Counter[Generation] = field(default_factory=Counter)
    """By generation in memory the starts that ended because it was bad, and all there was."""
    held: HeldTerm | None = None
    """The term that ran last, where no claim since is known."""
    out: list[m.CoordinatorInstruction] = field(default_factory=list)
    nodes: tuple[int, ...] = ()
    """By rank."""
    every_node: tuple[int, ...] = ()
    """Each of them once, ascending."""
    attaches: dict[int, m.TrainerAttached] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    """Ranks that attached and were not reported lost."""
    lost: set[int] = field(default_factory=set)
    """Ranks that have ended while the others train: no save can be complete without them."""
    unreachable: set[int] = field(default_factory=set)
    """Nodes reported lost and not heard of since."""
    refusal: tuple[str, bool, bool] = ("", False, False)
    """(reason, retryable, while restoring) for late ranks."""
    term: int = 0
    is_in_same_term: bool = False
    """Rule 21: these trainers go on in `held`, without a claim."""
    is_withdrawing: bool = False
    """The claim was asked back, or is not to be asked back any more."""
    parts: tuple[m.TermParent, ...] = ()
    """Where trainers began anew within the term, the newest first."""
    rejoining: int | None = None
    """The running term a new coordinator keeper continues."""
    is_claim_due: bool = False
    """The storage did not answer for that term, and is asked again."""
    catalogue: dict[Generation, m.CatalogueEntry] = field(default_factory=dict)
    parents: dict[int, Generation | None] = field(default_factory=dict)
    chain: tuple[m.TermParent, ...] = ()
    ever_durable: bool = False
    """Something of this run was durable once, even if it is gone now."""
    inventory: dict[int, m.InventoryReported] = field(default_factory=dict)
    """By node."""
    struck: set[Strike] = field(default_factory=set)
    attempt: int = 0
    choice: Choice | None = None
    """None: from scratch."""
    scratch: str = ""
    """Why nothing of an earlier start is resumed; "" where something is, or there was none."""
    verified: set[int] = field(default_factory=set)
    memory_committed: Generation | None = None
    """Newest healthy one that all ranks hold."""
    redundancy: Redundancy | None = None
    """Of the newest plan that was decided here; None: none was."""
    placed: Redundancy | None = None
    """The one by which copies are placed; None: not yet."""
    replicated: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By node the ranks of other nodes whose shards it copies."""
    sets: tuple[ParityRanks, ...] = ()
    """Every rank in one of them, where memory is protected by parity."""
    holders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By node its ranks that hold a parity."""
    copies_wanted: int = 0
    """Shards that a round counts: every original, and every copy."""
    parities_wanted: int = 0
    round: Round | None = None
    protected: Generation | None = None
    """Newest one of which every copy was sealed."""
    intact: bool = False
    """They still are, as far as is known."""
    dropping: set[Generation] = field(default_factory=set)
    """Checkpoints whose optimizer state is being dropped, or cannot be in this start."""
    saves: dict[Generation, Save] = field(default_factory=dict)
    begun: dict[int, m.RankBegan] = field(default_factory=dict)
    """News of the newest generation that each rank has begun."""
    floor: Generation | None = None
    """Saves up to here are settled and forgotten."""
    breakpoint: bool = False
    """Every memory commit goes to disk: the end of this incarnation is near."""
    bare: bool = False
    """The directory was made again and is empty: generations in memory go there."""
    known_term: int = 0
    """Newest term that any node of the incarnation knew when it attached."""
    proposal: Proposal | None = None
    plan_newest: int = 0
    """Newest version ever proposed in this term."""
    plan_verdicts: dict[int, int | None] = field(default_factory=dict)
    """Apply step by version; None: dropped."""

    def reset(self) -> None:
        """Forget everything about the incarnation; keep the fields in `_KEPT`."""
        fresh = type(self)()
        for each in fields(self):
            if each.name not in _KEPT:
                setattr(self, each.name, getattr(fresh, each.name))

    @property
    def protects(self) -> bool:
        """Copies or parities are wanted at all."""
        return bool(self.sets) or any(self.replicated.values())

    @property
    def incarnation(self) -> m.Incarnation | None:
        """Whose trainers this coordinator serves."""
        return self.admission.current

    @property
    def world_size(self) -> int:
        """Ranks of the incarnation."""
        return len(self.nodes)

    def settled_for(self, incarnation: m.Incarnation | None) -> bool:
        """The ranks of `incarnation` wait for no verdict from here.

        Ranks that another coordinator has admitted never do.
        """
        return incarnation != self.incarnation or all(s.finished for s in self.saves.values())

    def emit(self, *instructions: m.CoordinatorInstruction) -> None:
        """Add to the answer of the event being handled."""
        self.out.extend(instructions)

    def send(self, node: int, message: m.ToNode) -> None:
        """To one node."""
        self.emit(m.Send(to_node=node, message=message))

    def broadcast(self, message: m.ToNode) -> None:
        """To every node of the incarnation."""
        for node in self.every_node:
            self.send(node, message)

    def by_node(self, ranks: Iterable[int]) -> dict[int, list[int]]:
        """Return the nodes of `ranks`, each with its own ranks."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.nodes[rank], []).append(rank)
        return found

    def accepts(self, generation: Generation) -> bool:
        """Rule 9: news about another term than the open one is from a zombie or late."""
        return self.phase == "running" and self.is_of_term(generation)

    def is_of_term(self, generation: Generation) -> bool:
        """The trainers that run made it, or will."""
        first = self.parts[0].attempt if self.parts else 0
        return generation.term == self.term and generation.attempt >= first

    def chain_of_term(self) -> tuple[m.TermParent, ...]:
        """From the open term back."""
        return (*self.parts, *chain_from(self.term, self.parents))

    def began_from(self) -> Generation | None:
        """The checkpoint that these trainers begin from; None: they begin from scratch."""
        return self.parts[0].parent if self.parts else self.parents.get(self.term)

    def stale(self, what: object) -> None:
        """Something older than the present arrived: ignore it, but say so."""
        self.emit(m.Report(kind="stale", detail=f"coordinator: ignored {m.brief(what)}"))

    def go(self, phase: CoordinatorPhase) -> None:
        """Change phase, if the table has it; its deadline starts now."""
        moved("coordinator", self.phase, phase)
        self.phase, self.began_s = phase, self.now_s

    def waited_s(self) -> float:
        """How long the current phase lasts."""
        return self.now_s - self.began_s
