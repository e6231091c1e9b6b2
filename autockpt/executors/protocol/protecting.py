"""The protecting part of the coordinator: rounds of copies, one generation at a time.

A generation that is memory-committed survives the death of trainers, not of a node.  In a *round*
every node fetches its wards' shards of one generation; when all copies are sealed it is
*protected*: as many nodes may be lost as the placement tolerates.  One round at a time, or two
nodes would for ever hold copies of different generations.  A round that fails ends: what is
protected stays so where there is room for it, and training never waits.
"""

from autockpt.executors.protocol.coordinator_state import CoordinatorState, Round
from autockpt.executors.protocol.messages import (
    CopiesEnded,
    CopiesWanted,
    CopyFailed,
    CopySealed,
    HeldShard,
    Report,
)
from autockpt.executors.protocol.transitions import moved
from autockpt.values.errors import ConfigError
from autockpt.values.generation import Generation
from autockpt.values.placement import place


class Protecting(CoordinatorState):
    """Who copies what, and when it counts."""

    # ------------------------------------------------------------------ rules

    def all_copied(self, copies: Round) -> bool:
        """Rule 14: protected means that every shard is sealed here and everywhere it is copied."""
        wanted = {(rank, node) for node, ranks in self.wards.items() for rank in ranks}
        return copies.sealed >= wanted | set(enumerate(self.nodes))

    # ------------------------------------------------------------------ who copies what

    def place_copies(self) -> None:
        """Wards of every node, as all trainers of this incarnation want it."""
        self.wards = {}
        first = self.attaches[min(self.attaches)]
        if first.redundancy.copies < 2:
            return
        nodes = sorted(set(self.nodes))
        try:
            placement = place(first.redundancy, nodes, first.domains)
        except ConfigError as error:
            self.emit(Report(kind="warning", detail=f"no copies on other nodes: {error}"))
            return
        for cell in placement.cells:
            for node in cell.members:
                kept = cell.kept_by(node)
                self.wards[node] = tuple(r for r, on in enumerate(self.nodes) if on in kept)

    # ------------------------------------------------------------------ rounds

    def begin_round(self) -> None:
        """Of the newest generation, unless one is under way or it is protected already."""
        newest = self.memory_committed
        if newest is None or self.round is not None or not any(self.wards.values()):
            return
        if self.intact and self.protected is not None and newest <= self.protected:
            return
        self._set_round(Round(generation=newest, began_s=self.now_s))
        self.repeat_round()

    def copy_sealed(self, from_node: int, message: CopySealed) -> None:
        """One more copy; the last one makes the generation protected."""
        shard = message.shard
        copies = self.round
        if copies is None or shard.generation != copies.generation:
            if shard.generation == self.protected:
                self.send(from_node, CopiesEnded(generation=shard.generation, protected=True))
            else:
                self.stale(message)
            return
        asked = shard.rank < self.world_size and (
            self.nodes[shard.rank] == from_node or shard.rank in self.wards.get(from_node, ())
        )
        if not asked or not self._is_original(message):
            detail = f"node {from_node} has a copy of rank {shard.rank} that nobody sealed"
            self.end_round(detail)
            return
        copies.sealed.add((shard.rank, from_node))
        if self.all_copied(copies):
            self._set_round(None)
            self.protected, self.intact = copies.generation, True
            self.broadcast(CopiesEnded(generation=copies.generation, protected=True))
            self.begin_round()

    def _is_original(self, message: CopySealed) -> bool:
        """The copy has the content that its owner sealed, as far as that is remembered."""
        owned = self._sealed(message.shard.generation).get(message.shard.rank)
        return owned is None or owned.root == message.shard.root

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

    def _set_round(self, copies: Round | None) -> None:
        before, after = ("wanted" if r else "none" for r in (self.round, copies))
        moved("round of copies", before, after)
        self.round = copies

    def expire_round(self) -> None:
        """Every wait ends."""
        if self.round is None:
            return
        waited = self.now_s - self.round.began_s
        if waited >= self.deadlines.copies_s:
            self.end_round(f"copies were not complete within {waited:.0f} s")

    def repeat_round(self) -> None:
        """Ask again; nodes that have their copies say so again."""
        if self.round is None:
            return
        generation = self.round.generation
        sealed = self._sealed(generation)
        for node in sorted(set(self.nodes)):
            shards = tuple(sealed[rank] for rank in self.wards.get(node, ()) if rank in sealed)
            self.send(node, CopiesWanted(generation=generation, shards=shards))

    def _sealed(self, generation: Generation) -> dict[int, HeldShard]:
        """Shards by rank, as their owners sealed them: in this epoch, or before it."""
        if generation in self.saves:
            return self.saves[generation].sealed
        reports = (shard for report in self.inventory.values() for shard in report.held)
        return {shard.rank: shard for shard in reports if shard.generation == generation}
