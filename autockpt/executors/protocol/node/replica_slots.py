"""The replica slots of a node: shards and parities that it holds for ranks of other nodes.

A shard that is sealed elsewhere is *fetched* into a replica slot, to protect it or to restore it.
The node that fetches decides when.  The node that is asked only keeps its slot, until the round of
copies ends.  A parity has several sources.
"""

from dataclasses import replace

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.node.slots import Slot, Slots
from autockpt.executors.protocol.node.state import Fetch, LocalRank, NodeState, Replica, replica_of
from autockpt.values.generation import Generation

REPLICA_SLOTS = 2
"""Slots of each replicated rank or parity: the newest protected checkpoint, and the arriving
one."""
MOST_REPLICA_SLOTS = 4
"""While restoring, no slot is overwritten: an older checkpoint may have to be chosen next."""


class ReplicaSlots:
    """Chooses, fills and frees replica slots."""

    def __init__(self, state: NodeState) -> None:
        self.state = state

    # ------------------------------------------------------------------ rules

    def is_kept(self, generation: Generation) -> bool:
        """Rule 14: a checkpoint that is protected, or about to be, stays until a newer one is."""
        return generation in (self.state.protected, self.state.copying)

    def may_overwrite_replica(self, slot: Slot) -> bool:
        """A replica slot is free unless it is being filled or holds a kept checkpoint.

        A slot is looked for where what is wanted is not here: then it is not the renewed parity.
        """
        if slot.state != "sealed" or slot.generation is None:
            return slot.state == "empty"
        if slot.worthless or slot.renewed or not self.state.is_eligible(slot.generation):
            return True
        return self.state.phase == "open" and not self.is_kept(slot.generation)

    def copied(self) -> Generation | None:
        """The checkpoint of a round without a known end, if this node has its part of it."""
        state, generation = self.state, self.state.copying
        if generation is None or state.fetches:
            return None
        asked = {parity.rank: parity for parity in state.asked}
        copies = [self.copy_of(rank, generation) for rank in state.replicated]
        copies += [self.sealed_replica(asked[r]) if r in asked else None for r in state.holders]
        own = (local for local in state.ranks.values() if local.attach is not None)
        originals = (self.original_of(local, generation) for local in own)
        return generation if all((*copies, *originals)) else None

    def seal(self, shard: m.HeldShard) -> None:
        """A fetched shard is complete.  One of each generation is enough, except of parities."""
        slots = self.state.replicas[replica_of(shard)].slots
        older = [s for s in slots if s.state == "sealed" and s.generation == shard.generation]
        for slot in older:
            slot.worthless = slot.worthless or slot.renewed or shard.parity is None
        slots[shard.slot].seal(shard)
        slots[shard.slot].renewed = not all(slot.worthless for slot in older)

    def drop_renewed(self, wanted: m.HeldShard) -> None:
        """An older parity of that generation is wanted again."""
        for slot in self.replicas_of(replica_of(wanted)).slots:
            if slot.renewed and slot.generation == wanted.generation and slot.shard != wanted:
                slot.worthless, slot.renewed = True, False

    def settle_parities(self, generation: Generation) -> None:
        """It is protected by the parities that were asked for last: older ones may go."""
        for slots in self.state.replicas.values():
            sealed = [s for s in slots.slots if s.state == "sealed" and s.generation == generation]
            if any(slot.renewed for slot in sealed):
                for slot in sealed:
                    slot.worthless = slot.worthless or not slot.renewed
                    slot.renewed = False

    # ------------------------------------------------------------------ fetches

    def begin_fetch(self, shard: m.HeldShard, sources: tuple[m.ShardCopy, ...], slot: Slot) -> None:
        state = self.state
        assert state.incarnation is not None
        slot.begin(shard.generation, shard.step, state.incarnation)
        state.fetches[replica_of(shard)] = Fetch(
            slot=slot.index, generation=shard.generation, sources=sources, parity=shard.parity
        )
        state.emit(m.FetchShard(shard=shard, sources=sources, slot=slot.index))

    def abort_fetch(self, replica: Replica, reason: str) -> None:
        fetch = self.state.fetches.pop(replica, None)
        if fetch is None:
            return
        rank, parity = replica
        self.state.emit(
            m.AbortFetch(
                rank=rank, generation=fetch.generation, slot=fetch.slot, reason=reason,
                parity=parity,
            )
        )  # fmt: skip
        self.state.replicas[replica].slots[fetch.slot].clear()

    def abort_fetches(self, reason: str) -> None:
        """Nothing of it is wanted any more."""
        for replica in list(self.state.fetches):
            self.abort_fetch(replica, reason)

    def shard_coming(self, event: m.ShardComing) -> None:
        """How far it has come; the coordinator hears of it when it asks again."""
        fetch = self.state.fetches.get((event.rank, event.parity))
        if fetch is None or (fetch.slot, fetch.generation) != (event.slot, event.generation):
            self.state.stale(event)
            return
        fetch.mark = event.mark

    # ------------------------------------------------------------------ slots

    def is_wanted(self, replica: Replica) -> bool:
        """Rounds of copies bring it here."""
        rank, parity = replica
        return rank in (self.state.holders if parity else self.state.replicated)

    def replicas_of(self, replica: Replica) -> Slots:
        """The slots for copies of a rank's shard, or for its parities; empty at first."""
        state = self.state
        if replica not in state.replicas:
            state.replicas[replica] = Slots()
            state.replicas[replica].resize(REPLICA_SLOTS)
        return state.replicas[replica]

    def copy_of(self, rank: int, generation: Generation) -> m.HeldShard | None:
        slot = self.replicas_of((rank, False)).sealed(generation)
        return None if slot is None or slot.worthless else slot.shard

    def sealed_replica(self, shard: m.HeldShard) -> m.HeldShard | None:
        """The copy, or the parity of the very same shards."""
        held = self.replicas_of(replica_of(shard)).restorable_shards()
        fits = (h for h in held if h.generation == shard.generation and h.parity == shard.parity)
        return next(fits, None)

    def original_of(self, local: LocalRank, generation: Generation) -> m.HeldShard | None:
        """The shard of a rank of this node, sealed in its slot or brought back."""
        copies = self.replicas_of((local.rank, False))
        slot = local.slots.sealed(generation) or copies.sealed(generation)
        return None if slot is None else slot.shard

    def choose_replica_slot(self, replica: Replica) -> Slot | None:
        """An empty one, else the oldest that may be overwritten; more while restoring."""
        replicas = self.replicas_of(replica)
        free = [slot for slot in replicas.slots if self.may_overwrite_replica(slot)]
        if (
            not free
            and self.state.phase == "restoring"
            and len(replicas.slots) < MOST_REPLICA_SLOTS
        ):
            replicas.resize(len(replicas.slots) + 1)
            free = replicas.slots[-1:]
        empty = [slot for slot in free if slot.generation is None]
        known = [(slot.generation, slot) for slot in free if slot.generation is not None]
        if empty:
            return empty[0]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    def outgrown(self, event: m.SlotsOutgrown) -> None:
        """Rule 2 for a rank of another world: new slots take the place of its restored shard.

        The shard stays until something newer is memory-committed, as replicas do.
        """
        state = self.state
        local = state.ranks.get(event.rank)
        replica = (event.rank, False)
        if local is None or event.tight:
            if (
                replica in state.replicas
                and replica not in state.fetches
                and not self.is_wanted(replica)
            ):
                del state.replicas[replica]
                state.emit(m.FreeReplicas(rank=event.rank))
            return
        for slot in local.slots.slots:
            shard = slot.shard
            if shard is None or slot.worthless or not self._is_outgrown_parent(shard):
                continue
            free = self.choose_replica_slot(replica)
            if free is not None and self.copy_of(shard.rank, shard.generation) is None:
                kept = replace(shard, slot=free.index, copied=True)
                free.adopt(kept)
                state.emit(
                    m.KeepOutgrown(rank=event.rank, slot=slot.index, replica_slot=free.index)
                )

    def _is_outgrown_parent(self, shard: m.HeldShard) -> bool:
        state = self.state
        newer = state.memory_committed is not None and state.memory_committed > shard.generation
        return (
            shard.world_size != len(state.nodes) and shard.generation == state.parent and not newer
        )

    def free_replicas(self) -> None:
        """Give back the memory of what does not belong here, once nothing in it is needed."""
        state = self.state
        for replica, slots in list(state.replicas.items()):
            if self.is_wanted(replica) or not all(self._is_passed(slot) for slot in slots.slots):
                continue
            del state.replicas[replica]
            state.emit(m.FreeReplicas(rank=replica[0], parity=replica[1]))
        for rank, local in list(state.ranks.items()):
            if local.attach is None and all(self._is_passed(slot) for slot in local.slots.slots):
                del state.ranks[rank]
                state.emit(m.FreeSlots(rank=rank))

    def _is_passed(self, slot: Slot) -> bool:
        newest = self.state.memory_committed
        if slot.state == "empty" or newest is None or slot.generation is None:
            return slot.state == "empty"
        passed = slot.generation < newest and not self.is_kept(slot.generation)
        return slot.state == "sealed" and passed
