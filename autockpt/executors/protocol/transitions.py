"""The phases of both machines, of a slot and of a save, as one table.

docs/internals/protocol.md prints it (`markdown`), the machines are checked against it (`moved`),
and the simulator counts that every row is walked.  No rule lives here.
"""

from dataclasses import dataclass
from typing import Literal

from autockpt.values import table

CoordinatorPhase = Literal[
    "idle",
    "gathering",
    "claiming",
    "inventory",
    "deciding",
    "restoring",
    "running",
    "refused",
    "fenced",
]
NodePhase = Literal["idle", "waiting", "restoring", "open", "fenced"]
SlotState = Literal["empty", "writing", "sealed"]
MemoryState = Literal["open", "committed", "dropped"]
DiskState = Literal["none", "open", "committing", "durable", "dropped"]
Actor = Literal["coordinator", "node", "slot", "save in memory", "save on disk", "round of copies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One row: `actor` goes from one of `sources` to `target` when `cause` happens."""

    actor: Actor
    sources: tuple[str, ...]
    target: str
    cause: str
    effect: str


def _row(actor: Actor, sources: str, target: str, cause: str, effect: str) -> Transition:
    names = tuple(sources.split(", "))
    return Transition(actor=actor, sources=names, target=target, cause=cause, effect=effect)


_ANY = "idle, gathering, claiming, inventory, deciding, restoring, running, refused, fenced"

TRANSITIONS: tuple[Transition, ...] = (
    _row("coordinator", _ANY, "gathering", "RankAttached of an incarnation that may take over", ""),
    _row(
        "coordinator",
        "gathering",
        "claiming",
        "all ranks attached, or a running one came back",
        "ClaimTerm",
    ),
    _row(
        "coordinator",
        "claiming",
        "inventory",
        "TermClaimed; ClaimWithdrawn",
        "InventoryWanted to every node",
    ),
    _row(
        "coordinator",
        "inventory",
        "restoring",
        "every node answered, all is in memory, the claim was withdrawn",
        "RestoreOrdered to all ranks",
    ),
    _row(
        "coordinator",
        "inventory, restoring",
        "claiming",
        "the claim was withdrawn, and memory has not all",
        "ClaimTerm",
    ),
    _row(
        "coordinator",
        "inventory, restoring",
        "deciding",
        "every node answered or deadline; ShardBad: source struck out; it is suspect",
        "WriteDecision",
    ),
    _row("coordinator", "deciding", "restoring", "DecisionWritten", "RestoreOrdered to all ranks"),
    _row("coordinator", "restoring", "running", "all ranks verified", "TermOpened"),
    _row("coordinator", "deciding", "running", "DecisionWritten: from scratch", "TermOpened"),
    _row("coordinator", "inventory", "running", "the term already ran (new keeper)", "TermOpened"),
    _row(
        "coordinator",
        "gathering, claiming, inventory, deciding, restoring",
        "refused",
        "TermRefused, rank or node lost, nothing recoverable, store cannot be read now, deadline",
        "AttachRefused, RestoreRefused",
    ),
    _row(
        "coordinator",
        "claiming, deciding, running",
        "fenced",
        "the directory has a newer term",
        "TermFenced",
    ),
    _row(
        "node",
        "idle, waiting, restoring, open, fenced",
        "waiting",
        "TrainerAttached of an incarnation that may take over",
        "FenceTrainer, AbortPersist, RankAttached",
    ),
    _row("node", "waiting, restoring", "restoring", "InventoryWanted", "InventoryReported"),
    _row("node", "waiting, restoring", "open", "TermOpened", "Resume or StartFresh"),
    _row("node", "waiting, restoring, open", "fenced", "TermFenced", "FenceTrainer, AbortPersist"),
    _row(
        "slot",
        "empty, sealed",
        "writing",
        "SaveRequested, or a copy or parity is wanted, and the slot may be overwritten",
        "GrantSlot, FetchShard",
    ),
    _row(
        "slot",
        "writing",
        "sealed",
        "ShardSealed of the open term, not dropped; ShardFetched",
        "RankSealed, CopySealed",
    ),
    _row(
        "slot",
        "writing",
        "empty",
        "ShardDiscarded, TrainerLost, FetchFailed, AbortFetch; ShardSealed after "
        "GenerationDropped or a takeover",
        "RankDropped",
    ),
    _row("slot", "sealed", "empty", "GenerationDropped; late ShardDiscarded", ""),
    _row(
        "round of copies",
        "none",
        "wanted",
        "a generation newer than the protected one is memory-committed; copies were lost",
        "CopiesWanted to every node",
    ),
    _row(
        "round of copies",
        "wanted",
        "none",
        "CopySealed of every shard, at home and away, and of every parity; CopyFailed, deadline, "
        "a node is lost",
        "CopiesEnded",
    ),
    _row(
        "save in memory",
        "open",
        "committed",
        "RankSealed from all ranks",
        "MemoryCommitted, CopiesWanted",
    ),
    _row(
        "save in memory",
        "open",
        "dropped",
        "RankDropped, TrainerLost, deadline, a newer one is memory-committed",
        "GenerationDropped",
    ),
    _row(
        "save on disk",
        "none",
        "open",
        "RankBegan with disk, RankPrepared, breakpoint",
        "PersistWanted (breakpoint, or to ranks that began it for memory alone)",
    ),
    _row(
        "save on disk",
        "open",
        "committing",
        "RankSealed and RankPrepared from all ranks",
        "WriteCommit",
    ),
    _row(
        "save on disk",
        "committing",
        "durable",
        "CommitWritten",
        "DurableCommitted, VerifyGeneration, DeleteGenerations",
    ),
    _row(
        "save on disk",
        "none, open, committing",
        "dropped",
        "RankDropped, deadline, CommitFailed, a newer one is durable",
        "GenerationDropped, TrashGeneration",
    ),
)

_ALLOWED = {(row.actor, source, row.target) for row in TRANSITIONS for source in row.sources}


def moved(actor: Actor, source: str, target: str) -> None:
    """Assert that the table has this move; a failure is a bug of ours, never the network's."""
    assert (actor, source, target) in _ALLOWED, f"{actor}: no transition {source} -> {target}"


def markdown() -> str:
    """The table as docs/internals/protocol.md shows it."""
    rows = [
        (
            row.actor,
            "any" if ", ".join(row.sources) == _ANY else ", ".join(row.sources),
            row.target,
            row.cause,
            row.effect,
        )
        for row in TRANSITIONS
    ]
    return "\n".join(table.markdown(("who", "from", "to", "when", "tells"), rows)) + "\n"
