"""Rounds of copies at a node: it fetches, encodes and keeps shards of one checkpoint.

Every node fetches shards of other nodes, or encodes parities of a set of ranks.  The coordinator
begins a round, counts the copies, and ends it.
"""

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.node.replica_slots import ReplicaSlots
from autockpt.executors.protocol.node.state import LocalRank, NodeState, replica_of
from autockpt.values.generation import Generation

FEW_SLOTS = 2
"""With so few slots a rank has none left to save into: one holds the protected checkpoint, one the
newest."""


class Replicating:
    """Takes part in the rounds of copies."""

    def __init__(self, state: NodeState, replica_slots: ReplicaSlots) -> None:
        self.state = state
        self.replica_slots = replica_slots

    def copies_wanted(self, message: m.CopiesWanted) -> None:
        """Keep what we have of this generation, and fetch what we should have."""
        state = self.state
        generation = message.generation
        behind = state.copying is not None and generation < state.copying
        if not state.is_current_or_parent(generation) or behind:
            state.stale(message)
            return
        if message.protected is not None and message.protected == state.copying:
            state.protected = message.protected
        state.copying, state.asked = generation, message.parities
        state.replicated, state.holders = message.replicated, message.holders
        for shard in (*message.shards, *message.parities):
            fits = (shard.generation, shard.world_size) == (generation, len(state.nodes))
            if fits and self.replica_slots.is_wanted(replica_of(shard)):
                self._have(shard)
        for local in state.ranks.values():
            if local.attach is not None:
                self._report_original(local, generation)

    def _report_original(self, local: LocalRank, generation: Generation) -> None:
        """The original counts as a copy: it may have been overwritten before we were asked."""
        shard = self.replica_slots.original_of(local, generation)
        if shard is not None:
            self.state.tell(m.CopySealed(shard=shard))
        else:
            reason = "its own was overwritten"
            self.state.tell(m.CopyFailed(owner=local.rank, generation=generation, reason=reason))

    def _have(self, shard: m.HeldShard) -> None:
        """Say that it is here, or begin to bring it here."""
        state = self.state
        replica, generation = replica_of(shard), shard.generation
        here, fetch = self.replica_slots.sealed_replica(shard), state.fetches.get(replica)
        if here is not None:
            self.replica_slots.drop_renewed(here)
            state.tell(m.CopySealed(shard=here))
        elif fetch is None or (fetch.generation, fetch.parity) != (generation, shard.parity):
            self.replica_slots.abort_fetch(replica, f"{generation} is wanted")
            slot = self.replica_slots.choose_replica_slot(replica)
            if slot is not None:
                self.replica_slots.begin_fetch(shard, self._sources(shard), slot)
                return
            reason = "no replica slot is free"
            state.tell(m.CopyFailed(owner=shard.rank, generation=generation, reason=reason))
        elif fetch.mark:
            rank, parity = replica
            state.tell(
                m.CopyComing(owner=rank, generation=generation, mark=fetch.mark, parity=parity)
            )

    def _sources(self, shard: m.HeldShard) -> tuple[m.ShardCopy, ...]:
        """A copy is fetched from its owner, a parity is made of the shards of the other members."""
        if shard.parity is None:
            return (m.ShardCopy(node=self.state.nodes[shard.rank], shard=shard),)
        others = [m.rank for m in shard.parity.members if m.rank != shard.rank]
        return tuple(
            m.ShardCopy(node=self.state.nodes[r], shard=shard.of_member(r)) for r in others
        )

    def copies_ended(self, message: m.CopiesEnded) -> None:
        """All copies are there, or they will not be."""
        state = self.state
        generation = message.generation
        if not state.is_current_or_parent(generation):
            state.stale(message)
            return
        if state.copying is not None and state.copying <= generation:
            state.copying = None
        if message.protected:
            self.replica_slots.settle_parities(generation)
            self._protect(generation)
        else:
            self._copies_failed(generation, message.reason)
        self.replica_slots.free_replicas()

    def _protect(self, generation: Generation) -> None:
        state = self.state
        if state.protected is None or generation > state.protected:
            state.protected = generation
        if state.announced != generation:
            state.announced = generation
            state.emit(m.AnnounceProtected(generation=generation))

    def _copies_failed(self, generation: Generation, reason: str) -> None:
        """Where a rank has few slots what is kept would leave none: saving goes first."""
        state = self.state
        for replica in [g for g, fetch in state.fetches.items() if fetch.generation == generation]:
            self.replica_slots.abort_fetch(replica, reason)
        if any(local.slots.usable == FEW_SLOTS for local in state.ranks.values()):
            self.unprotect(reason)
        elif state.announced is not None or state.protected is None:
            self._announce_loss(reason)

    def unprotect(self, reason: str) -> None:
        """Nothing is kept any more for the loss of a node."""
        self.state.protected = None
        self._announce_loss(reason)

    def _announce_loss(self, reason: str) -> None:
        self.state.announced = None
        self.state.emit(m.AnnounceProtected(generation=None, reason=reason))
