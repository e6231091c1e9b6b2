"""Select the generation to restore: one pure choice for all ranks, on one lineage.

After a rollback the same steps are trained again.  A generation that was left behind may thus be
greater than the restored one and still be wrong.  Every term therefore records its *parent*, the
generation it began from.  Following parents from the newest term gives the *chain*.  A generation
is eligible if its term stands on the chain and it is not newer than the point where the chain left
that term.  All others are abandoned for ever.

Source: docs/internals/protocol.md, rules 5 to 8.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autockpt.executors.protocol.messages import (
    CatalogueEntry,
    Health,
    HeldShard,
    Record,
    ShardCopy,
    ShardSource,
    TermParent,
)
from autockpt.executors.protocol.parity_recovery import ParitySets, rebuilt
from autockpt.values.generation import Generation

Strike = tuple[int, Generation, str]
"""(rank, generation, kind of source) that turned out bad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything the choice depends on."""

    world_size: int
    memory: tuple[HeldShard, ...]
    """Shards in the slots of the node where their rank lives *now*."""
    nodes: tuple[int, ...] = ()
    """Where every rank lives now, [world_size]."""
    copies: tuple[ShardCopy, ...] = ()
    """Shards in the memory of other nodes."""
    parities: tuple[ShardCopy, ...] = ()
    """Parities in the memory of any node."""
    committed: tuple[CatalogueEntry, ...]
    chain: tuple[TermParent, ...]
    layout_digests: tuple[str, ...] = ()
    """The layout digest of each rank today, [world_size]; empty: unknown, matches."""
    struck: frozenset[Strike] = frozenset()
    suspect: frozenset[Generation] = frozenset()
    """Found to be since they were sealed and committed."""
    resume_from: Generation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The answer: one generation, and a source per rank."""

    generation: Generation
    step: int
    sources: tuple[ShardSource, ...] = field(default_factory=tuple)
    """[world_size]."""
    places: tuple[ShardCopy, ...] = ()
    """For gathering: the places of its shards in memory, now or after they are rebuilt."""
    rebuilds: Mapping[int, tuple[ShardSource, ...]] = field(default_factory=dict)
    """For gathering: by node, the shards that it rebuilds from parity first."""
    at_home: bool = False
    """Every shard is in the memory of the node where its rank lives."""

    @property
    def rebuilt(self) -> tuple[int, ...]:
        """Ranks whose shards some node rebuilds for all that gather."""
        sources = itertools.chain.from_iterable(self.rebuilds.values())
        return tuple(sorted(s.shard.rank for s in sources if s.shard is not None))

    @property
    def in_memory(self) -> bool:
        """Every rank holds its shard in its node's memory, or does once it is restored."""
        brought = all(source.kind in ("memory", "peer", "parity") for source in self.sources)
        return brought or self.at_home


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """The shards of one generation in the memory of all nodes."""

    held: Mapping[int, HeldShard]
    """By rank, where it lives now."""
    copies: Mapping[int, ShardCopy]
    """By rank, elsewhere."""
    parities: tuple[ShardCopy, ...]

    def health(self) -> Iterator[Health]:
        """Of every shard."""
        yield from (shard.health for shard in self.held.values())
        yield from (copy.shard.health for copy in self.copies.values())
        made_of = {parity.shard.parity for parity in self.parities}
        yield from (m.health for parity in made_of if parity is not None for m in parity.members)

    @property
    def across_nodes(self) -> bool:
        """No node has all of its state."""
        copies = (copy.shard for copy in self.copies.values())
        return any(shard.across_nodes for shard in (*self.held.values(), *copies))

    def step(self) -> int:
        """The same for all of them."""
        shards = (*self.held.values(), *(c.shard for c in (*self.copies.values(), *self.parities)))
        return shards[0].step

    def pieces(self, question: Question) -> dict[int, ShardCopy]:
        """Every shard with a node that has it."""
        own = {r: ShardCopy(node=question.nodes[r], shard=shard) for r, shard in self.held.items()}
        return {**self.copies, **own}


def parents_of(
    decisions: Iterable[TermParent], committed: Iterable[CatalogueEntry]
) -> dict[int, Generation | None]:
    """Parent of every known term; commits fill in for decision records that are missing."""
    parents = {entry.generation.term: entry.parent for entry in committed}
    parents.update({decision.term: decision.parent for decision in decisions})
    return parents


def chain_from(term: int, parents: Mapping[int, Generation | None]) -> tuple[TermParent, ...]:
    """The chain of parents from `term` back, newest first; ends where a record is missing."""
    chain: list[TermParent] = []
    while term in parents:
        parent = parents[term]
        chain.append(TermParent(term=term, parent=parent))
        if parent is None or parent.term >= term:  # the second would be a corrupt record
            break
        term = parent.term
    return tuple(chain)


def newest_chain(parents: Mapping[int, Generation | None]) -> tuple[TermParent, ...]:
    """The chain of the newest decided term, which the next term may continue."""
    return chain_from(max(parents), parents) if parents else ()


def on_lineage(generation: Generation, chain: tuple[TermParent, ...]) -> bool:
    """True if `generation` was never left behind, seen from the newest term of `chain`.

    A term stands in it more than once where its trainers began anew within it (rule 21).
    """
    if not chain:
        return False
    if generation.term == chain[0].term and generation.attempt >= chain[0].attempt:
        return True
    for link, older in itertools.zip_longest(chain, chain[1:]):
        limit = link.parent
        if limit is None or generation.term != limit.term or generation > limit:
            continue
        # The part of the term that `limit` is of may have begun behind `generation`.
        if older is None or older.term != limit.term or generation.attempt >= older.attempt:
            return True
    return False


def weights_only_refusal(generation: str) -> str:
    """Why a generation without optimizer state is not resumed from."""
    return (
        f"{generation}: holds weights only, for keep.weights_only has dropped its optimizer state. "
        "Nothing can be resumed from it. Resume from a newer checkpoint, or begin another run with "
        'its weights: attach(load={"model": CHECKPOINT})'
    )


def choose(question: Question) -> Choice | None:
    """The greatest eligible generation whose every shard is recoverable; None if there is none."""
    for generation in sorted(_candidates(question), reverse=True):
        entry = _entry(question, generation)
        wrote = _world_size(question, generation, entry)
        choice = (
            _as_it_was(question, generation, entry)
            if wrote == question.world_size
            else _regrouped(question, generation, entry, wrote)
        )
        if choice is not None:
            return choice
    return None


def _world_size(
    question: Question, generation: Generation, entry: CatalogueEntry | None
) -> int | None:
    """Number of ranks that wrote it; None: no copy of it is known."""
    if entry is not None:
        return entry.world_size
    elsewhere = (copy.shard for copy in (*question.copies, *question.parities))
    shards = itertools.chain(question.memory, elsewhere)
    return next((s.world_size for s in shards if s.generation == generation), None)


def _as_it_was(
    question: Question, generation: Generation, entry: CatalogueEntry | None
) -> Choice | None:
    """As many ranks as wrote it: each gets its own shard."""
    memory = _Memory(
        held=_own_slots(question, generation),
        copies=_copies(question, generation),
        parities=_parities(question, generation, question.world_size),
    )
    if not _selectable(question, generation, entry, memory.health()):
        return None
    if memory.across_nodes:
        world_size = question.world_size
        found = _pieces(question, generation, world_size)
        gathered = _gathered(question, entry, world_size, found, memory.parities)
        if gathered is not None:
            return gathered
        memory = _Memory(held={}, copies={}, parities=())  # a shard of it is no state by itself
    sources = tuple(_sources(question, generation, entry, memory, _Rebuilding(question, memory)))
    if len(sources) < question.world_size:
        return None
    step = entry.step if entry is not None else memory.step()
    return Choice(generation=generation, step=step, sources=sources)


def _candidates(question: Question) -> set[Generation]:
    known = {shard.generation for shard in question.memory}
    known |= {copy.shard.generation for copy in (*question.copies, *question.parities)}
    known |= {entry.generation for entry in question.committed}
    if question.resume_from is not None:
        known &= {question.resume_from}
    return {generation for generation in known if on_lineage(generation, question.chain)}


def _entry(question: Question, generation: Generation) -> CatalogueEntry | None:
    return next((e for e in question.committed if e.generation == generation), None)


def _own_slots(question: Question, generation: Generation) -> dict[int, HeldShard]:
    """Return shards by rank; its own slot before a copy that was fetched to its node."""
    return {
        shard.rank: shard
        for shard in sorted(question.memory, key=lambda shard: shard.copied, reverse=True)
        if _fits(question, shard, generation, ShardSource(kind="memory"))
    }


def _copies(question: Question, generation: Generation) -> dict[int, ShardCopy]:
    """By rank one of the nodes that have it, the lowest."""
    return {
        copy.shard.rank: copy
        for copy in sorted(question.copies, key=lambda copy: copy.node, reverse=True)
        if _fits(question, copy.shard, generation, ShardSource(kind="peer", node=copy.node))
    }


def _parities(question: Question, generation: Generation, world_size: int) -> tuple[ShardCopy, ...]:
    return tuple(
        parity
        for parity in question.parities
        if parity.shard.generation == generation and parity.shard.world_size == world_size
    )


def _fits(
    question: Question, shard: HeldShard, generation: Generation, source: ShardSource
) -> bool:
    return (
        shard.generation == generation
        and shard.world_size == question.world_size
        and shard.rank < question.world_size
        and (shard.rank, generation, source.name) not in question.struck
        and _matches(question, shard.rank, shard.layout_digest)
    )


def _selectable(
    question: Question,
    generation: Generation,
    entry: CatalogueEntry | None,
    health: Iterable[Health],
) -> bool:
    """Suspect or quarantined states are restored only when a person asks for exactly them."""
    if question.resume_from == generation:
        return True
    if generation in question.suspect:
        return False
    if entry is not None and (entry.quarantined or entry.health != "good"):
        return False
    return all(verdict == "good" for verdict in health)


def _sources(
    question: Question,
    generation: Generation,
    entry: CatalogueEntry | None,
    memory: _Memory,
    rebuilding: "_Rebuilding",
) -> Iterator[ShardSource]:
    """A source per rank: own memory, a peer's, parity, disk; ends at the first that has none."""
    for rank in range(question.world_size):
        disk = _disk_record(question, entry, rank)
        expected = _root(entry, rank)
        shard, copy = memory.held.get(rank), memory.copies.get(rank)
        if shard is not None and expected in ("", shard.root):
            yield ShardSource(kind="memory", slot=shard.slot, copied=shard.copied, root=shard.root)
        elif copy is not None and expected in ("", copy.shard.root):
            yield ShardSource(kind="peer", node=copy.node, shard=copy.shard, root=copy.shard.root)
        elif (source := _rebuilt(question, generation, rank, expected, rebuilding)) is not None:
            yield source
        elif disk is not None:
            yield ShardSource(kind="disk", root=expected, records=(disk,))
        else:
            return


class _Rebuilding:
    """The sources of lost shards: looked up for many, so it is put in order once."""

    def __init__(self, question: Question, memory: _Memory) -> None:
        self.sets = ParitySets(memory.parities)
        self.pieces = memory.pieces(question) if memory.parities else {}


def _rebuilt(
    question: Question, generation: Generation, rank: int, expected: str, rebuilding: _Rebuilding
) -> ShardSource | None:
    for source in rebuilt(rank, rebuilding.pieces, rebuilding.sets):
        shard = source.shard
        sound = shard is not None and _fits(question, shard, generation, source)
        if sound and expected in ("", source.root):
            return source
    return None


def _root(entry: CatalogueEntry | None, rank: int) -> str:
    """Digest the commit names for this rank's content; empty if it names none."""
    if entry is None or not _complete(entry):
        return ""
    return str(entry.records[rank].get("root", ""))


def _disk_record(question: Question, entry: CatalogueEntry | None, rank: int) -> Record | None:
    if entry is None or entry.corrupt or not _complete(entry):
        return None
    if (rank, entry.generation, "disk") in question.struck:
        return None
    if entry.layout_digests and not _matches(question, rank, entry.layout_digests[rank]):
        return None
    return entry.records[rank]


def _complete(entry: CatalogueEntry | None) -> bool:
    """The commit lists one file per rank, as its world size says, and each holds all state."""
    if entry is None or entry.weights_only or len(entry.records) != entry.world_size:
        return False
    return len(entry.layout_digests) in (0, entry.world_size)


def _regrouped(
    question: Question, generation: Generation, entry: CatalogueEntry | None, wrote: int | None
) -> Choice | None:
    """Another number of ranks wrote it: each takes its parts from all shards, wherever they are."""
    if wrote is None or (entry is not None and not entry.reshardable):
        return None
    found = _pieces(question, generation, wrote)
    parities = _parities(question, generation, wrote)
    health = itertools.chain(
        (copy.shard.health for copy in found),
        (m.health for p in parities if p.shard.parity is not None for m in p.shard.parity.members),
    )
    if not _selectable(question, generation, entry, health):
        return None
    gathered = _gathered(question, entry, wrote, found, parities) if found else None
    return gathered or (None if entry is None else _reshard(question, entry))


def _pieces(question: Question, generation: Generation, wrote: int) -> list[ShardCopy]:
    """The shards of a generation of `wrote` ranks in the memory of all nodes."""
    return [
        copy
        for copy in (*question.copies, *_at_home(question))
        if (copy.shard.generation, copy.shard.world_size) == (generation, wrote)
    ]


def _at_home(question: Question) -> Iterator[ShardCopy]:
    """A single node need not be named: then none is another one."""
    nodes = question.nodes or (0,) * question.world_size
    yield from (ShardCopy(node=nodes[shard.rank], shard=shard) for shard in question.memory)


def _gathered(
    question: Question,
    entry: CatalogueEntry | None,
    wrote: int,
    found: Sequence[ShardCopy],
    parities: Sequence[ShardCopy],
) -> Choice | None:
    """Every shard from memory, rebuilt in memory, or from its file; None: one has no place."""
    some = found[0].shard
    if any((rank, some.generation, "gather") in question.struck for rank in _ranks(question)):
        return None
    places: list[ShardCopy] = []
    lost: list[int] = []
    by_rank: dict[int, list[ShardCopy]] = {}
    for copy in found:
        by_rank.setdefault(copy.shard.rank, []).append(copy)
    for rank in range(wrote):
        known = by_rank.get(rank, [])
        root = _root(entry, rank) or next((copy.shard.root for copy in known), "")
        damaged = (rank, some.generation, "memory") in question.struck
        here = [copy for copy in known if copy.shard.root == root and not damaged]
        places += sorted(here, key=lambda copy: copy.node)
        lost += [] if here else [rank]
    pieces = {copy.shard.rank: copy for copy in places}
    rebuilds: dict[int, tuple[ShardSource, ...]] = {}
    sets = ParitySets(parities)
    for rank in lost:
        source = next(rebuilt(rank, pieces, sets), None)
        if source is not None and source.shard is not None and _agrees(entry, rank, source.root):
            nodes = sorted({piece.node for piece in source.pieces})
            node = nodes[rank % len(nodes)]
            rebuilds[node] = (*rebuilds.get(node, ()), source)
            places.append(ShardCopy(node=node, shard=source.shard))
        elif entry is None or entry.corrupt or not _complete(entry):
            return None
    return Choice(
        generation=some.generation, step=some.step,
        sources=(ShardSource(kind="gather"),) * question.world_size,
        places=tuple(places), rebuilds=rebuilds,
        at_home=wrote == question.world_size and _is_at_home(question, places),
    )  # fmt: skip


def _is_at_home(question: Question, places: Sequence[ShardCopy]) -> bool:
    """The node of every rank has that rank's own shard."""
    nodes = question.nodes or (0,) * question.world_size
    return {(copy.shard.rank, copy.node) for copy in places} >= set(enumerate(nodes))


def _agrees(entry: CatalogueEntry | None, rank: int, root: str) -> bool:
    return _root(entry, rank) in ("", root)


def _ranks(question: Question) -> range:
    return range(question.world_size)


def _reshard(question: Question, entry: CatalogueEntry) -> Choice | None:
    """Every rank reads from all files."""
    struck = any((r, entry.generation, "reshard") in question.struck for r in _ranks(question))
    if entry.corrupt or struck or not _complete(entry):
        return None
    source = ShardSource(kind="reshard")
    sources = (source,) * question.world_size
    return Choice(generation=entry.generation, step=entry.step, sources=sources)


def _matches(question: Question, rank: int, layout_digest: str) -> bool:
    """Two layouts match if they are equal or one of them is not known."""
    if not question.layout_digests or not layout_digest:
        return True
    return question.layout_digests[rank] in ("", layout_digest)
