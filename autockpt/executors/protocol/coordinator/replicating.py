"""The protecting part of the coordinator: rounds of copies, one generation at a time.

A generation that is memory-committed survives the death of trainers, not of a node.  In a *round*
every node fetches its wards' shards of one generation, or encodes parities of them; when all are
sealed it is *protected*: as many nodes may be lost as the placement tolerates.  One round at a
time, or two nodes would for ever hold copies of different generations.  A round that fails ends:
what is protected stays so where there is room for it, and training never waits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autockpt.executors.protocol.coordinator.state import CoordinatorState, ParityRanks, Round
from autockpt.executors.protocol.messages import (
    CopiesEnded,
    CopiesWanted,
    CopyComing,
    CopyFailed,
    CopySealed,
    HeldShard,
    ParityMember,
    ParityOf,
    Report,
)
from autockpt.executors.protocol.transitions import moved
from autockpt.values.errors import ConfigError
from autockpt.values.generation import Generation
from autockpt.values.placement import Cell, place, rank_sets, ranks_by_node


def parity_sets(cells: Iterable[Cell], nodes: Sequence[int]) -> Iterator[ParityRanks]:
    """Sets of ranks of every parity cell; `nodes`: by rank.

    Raises ConfigError where a node has so many more ranks than the others that some lack partners.
    """
    here = ranks_by_node(nodes)
    for cell in cells:
        for ranks in rank_sets(cell, here):
            yield ParityRanks(ranks=ranks, losses=cell.tolerates)


def parities_of(each: ParityRanks, shards: Mapping[int, HeldShard]) -> Iterator[HeldShard]:
    """What the members of a set are to hold; nothing while a shard of it is not known."""
    if not shards.keys() >= set(each.ranks):
        return
    members = tuple(
        ParityMember(
            rank=shard.rank, root=shard.root, layout_digest=shard.layout_digest,
            bytes=shard.bytes, health=shard.health,
        )
        for shard in (shards[rank] for rank in each.ranks)
    )  # fmt: skip
    made_of = ParityOf(members=members, losses=each.losses)
    for rank in each.ranks:
        shard = shards[rank]
        yield HeldShard(
            rank=rank, slot=0, generation=shard.generation, step=shard.step,
            world_size=shard.world_size, root="", chunk_bytes=shard.chunk_bytes, parity=made_of,
        )  # fmt: skip


class Protecting(CoordinatorState):
    """Who copies what, and when it counts."""

    # ------------------------------------------------------------------ rules

    def all_copied(self, copies: Round) -> bool:
        """Rule 14: protected means that every shard is sealed here and everywhere it is copied.

        Or that every member of its set has made its parity.  Only what was asked for is counted
        (`_is_asked`), so numbers say it.
        """
        encoded = len(copies.encoded) >= self.parities_wanted
        return encoded and len(copies.sealed) >= self.copies_wanted

    # ------------------------------------------------------------------ who copies what

    def place_copies(self) -> None:
        """Wards of every node, or parity sets, as all trainers of this incarnation want it."""
        self.wards, self.sets, self.holders = {}, (), {}
        self.copies_wanted, self.parities_wanted = self.world_size, 0
        first = self.attaches[min(self.attaches)]
        if first.redundancy.scheme == "none":
            return
        nodes = self.every_node
        try:
            cells = place(first.redundancy, nodes, first.domains).cells
            self.sets = tuple(parity_sets([c for c in cells if c.kind == "parity"], self.nodes))
        except ConfigError as error:
            self.emit(Report(kind="warning", detail=f"no copies on other nodes: {error}"))
            return
        self.holders = self._holders()
        here = ranks_by_node(self.nodes)
        for cell in cells:
            for node in cell.members:
                kept = sorted(r for other in cell.kept_by(node) for r in here.get(other, ()))
                self.wards[node] = tuple(kept)
        wards = {(rank, node) for node, ranks in self.wards.items() for rank in ranks}
        self.copies_wanted = len(wards | set(enumerate(self.nodes)))
        self.parities_wanted = len({rank for ranks in self.holders.values() for rank in ranks})

    @property
    def protects(self) -> bool:
        """Copies or parities are wanted at all."""
        return bool(self.sets) or any(self.wards.values())

    def _holders(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for rank in sorted(rank for each in self.sets for rank in each.ranks):
            found.setdefault(self.nodes[rank], []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    # ------------------------------------------------------------------ rounds

    def begin_round(self) -> None:
        """Of the newest generation, unless one is under way or it is protected already."""
        newest = self.memory_committed
        if newest is None or self.round is not None or not self.protects:
            return
        if self.intact and self.protected is not None and newest <= self.protected:
            return
        shards = self._sealed(newest)
        made = {parity.rank: parity for each in self.sets for parity in parities_of(each, shards)}
        self._set_round(Round(generation=newest, news_s=self.now_s, shards=shards, parities=made))
        self.repeat_round()

    def copy_sealed(self, from_node: int, message: CopySealed) -> None:
        """One more copy; the last one makes the generation protected."""
        shard = message.shard
        copies = self.round
        if copies is None or shard.generation != copies.generation:
            if self.intact and shard.generation == self.protected:
                self.send(from_node, CopiesEnded(generation=shard.generation, protected=True))
            else:
                self.stale(message)
            return
        if not self._is_asked(from_node, shard) or not self._is_original(copies, shard):
            what = "copy of" if shard.parity is None else "parity at"
            detail = f"node {from_node} has a {what} rank {shard.rank} that nobody asked for"
            self.end_round(detail)
            return
        before = len(copies.sealed) + len(copies.encoded)
        if shard.parity is None:
            copies.sealed.add((shard.rank, from_node))
        else:
            copies.encoded.add(shard.rank)
        if len(copies.sealed) + len(copies.encoded) > before:
            copies.news_s = self.now_s
        if self.all_copied(copies):
            self._set_round(None)
            self.protected, self.intact = copies.generation, True
            self.broadcast(CopiesEnded(generation=copies.generation, protected=True))
            self.begin_round()

    def _is_asked(self, node: int, shard: HeldShard) -> bool:
        """That node was to have it."""
        if shard.parity is not None:
            asked = self.round is not None and shard.rank in self.round.parities
            return asked and self.nodes[shard.rank] == node
        own = shard.rank < self.world_size and self.nodes[shard.rank] == node
        return own or shard.rank in self.wards.get(node, ())

    def _is_original(self, copies: Round, shard: HeldShard) -> bool:
        """It has the content that its owners sealed, as far as that is known."""
        if shard.parity is not None:
            return shard.parity == copies.parities[shard.rank].parity
        owned = copies.shards.get(shard.rank)
        return owned is None or owned.root == shard.root

    def copy_coming(self, from_node: int, message: CopyComing) -> None:
        """More of a copy is there: the round is not waited for in vain.

        One that begins anew, as it broke, is no news until it is further than before.
        """
        if self.round is None or message.generation != self.round.generation:
            self.stale(message)
            return
        marks, key = self.round.marks, (message.owner, from_node, message.parity)
        if message.mark > marks.get(key, 0):
            marks[key], self.round.news_s = message.mark, self.now_s

    def copy_failed(self, from_node: int, message: CopyFailed) -> None:
        """One copy will not be made, so the round is for nothing."""
        if self.round is None or message.generation != self.round.generation:
            self.stale(message)
            return
        self.end_round(f"node {from_node} has no copy of rank {message.owner}: {message.reason}")

    def end_round(self, reason: str) -> None:
        """It failed.  The next memory commit begins another one."""
        if self.round is None:
            return
        generation = self.round.generation
        self._set_round(None)
        self.emit(Report(kind="warning", detail=f"{generation} is not protected: {reason}"))
        self.broadcast(CopiesEnded(generation=generation, protected=False, reason=reason))

    def copies_lost(self, reason: str) -> None:
        """The guest slots of a node are gone with its keeper: all are to be copied once more.

        What was protected is kept all the same, where it still is.
        """
        self.end_round(reason)
        self.intact = False

    def unprotect(self, generation: Generation, reason: str) -> None:
        """Copies of it are worth nothing, made or under way."""
        if self.round is not None and self.round.generation == generation:
            self.end_round(reason)
        if self.protected == generation:
            self.protected, self.intact = None, False

    def _set_round(self, copies: Round | None) -> None:
        before, after = ("wanted" if r else "none" for r in (self.round, copies))
        moved("round of copies", before, after)
        self.round = copies

    def expire_round(self) -> None:
        """Every wait ends; copies that go on coming are waited for."""
        if self.round is None:
            return
        waited = self.now_s - self.round.news_s
        if waited >= self.deadlines.copies_s:
            self.end_round(f"nothing more of its copies came for {waited:.0f} s")

    def repeat_round(self) -> None:
        """Ask again; nodes that have their copies say so again."""
        if self.round is None:
            return
        copies = self.round
        for node in self.every_node:
            wards, holders = self.wards.get(node, ()), self.holders.get(node, ())
            wanted = CopiesWanted(
                generation=copies.generation,
                shards=tuple(copies.shards[rank] for rank in wards if rank in copies.shards),
                parities=tuple(
                    copies.parities[rank] for rank in holders if rank in copies.parities
                ),
            )
            self.send(node, wanted)

    def _sealed(self, generation: Generation) -> dict[int, HeldShard]:
        """Shards by rank, as their owners sealed them: in this term, or before it."""
        if generation in self.saves:
            return dict(self.saves[generation].sealed)
        shards = [shard for report in self.inventory.values() for shard in report.held]
        if self.choice is not None:
            shards += [source.shard for source in self.choice.sources if source.shard is not None]
        return {shard.rank: shard for shard in shards if shard.generation == generation}
