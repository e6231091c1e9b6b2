"""Wire messages of the coordinator to nodes."""

from dataclasses import dataclass
from typing import Any

from autockpt.executors.protocol.messages.facts import (
    Dispute,
    Health,
    HeldShard,
    Incarnation,
    Rebuild,
    ShardCopy,
    ShardSource,
    TermParent,
)
from autockpt.values.generation import Generation


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
    replicated: tuple[int, ...] = ()
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
    """Fetch your replicated ranks' shards of `generation`, encode your parities, keep your own.

    Repeated until CopiesEnded.
    """

    generation: Generation
    shards: tuple[HeldShard, ...] = ()
    """Shards of the replicated ranks of the receiving node."""
    parities: tuple[HeldShard, ...] = ()
    """To be made by the node that this is sent to."""
    replicated: tuple[int, ...] = ()
    """Its replicated ranks from this generation on: a plan may have changed the scheme."""
    holders: tuple[int, ...] = ()
    """The same of its ranks that hold a parity."""
    protected: Generation | None = None
    """The newest protected one, for a node that did not hear the end of its round."""


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

    Of the ranks that began it for memory alone while others write it; of all in a breakpoint save.
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
