"""The protecting part of a keeper's protocol: copies of other nodes' shards, fetched and kept.

One mechanism serves three purposes.  A shard that is sealed elsewhere is *fetched* into a guest
slot: to protect it (the coordinator wants copies of a generation), to restore from it (the rank
lives here now, its memory is there), to protect it again after a loss.  Who fetches decides when;
who is asked only keeps the slot, until the round of copies ends.
"""

from autockpt.executors.protocol.messages import (
    AbortFetch,
    AnnounceProtected,
    CopiesEnded,
    CopiesWanted,
    CopyFailed,
    CopySealed,
    FetchFailed,
    FetchShard,
    FreeGuests,
    HeldShard,
    RankBad,
    RestoreOrdered,
    RestoreShard,
    ShardFetched,
    ShardSource,
)
from autockpt.executors.protocol.node_state import Fetch, Key, LocalRank, NodeState
from autockpt.executors.protocol.slots import Slot, Slots
from autockpt.values.generation import Generation

GUEST_SLOTS = 2
"""Of each ward: the newest protected generation, and the one that is arriving."""
MOST_GUEST_SLOTS = 4
"""While restoring, nothing is overwritten: something older may have to be chosen next."""


class NodeProtecting(NodeState):
    """Guest slots of this node: what is fetched into them, and what may go."""

    # ------------------------------------------------------------------ rules

    def is_kept(self, generation: Generation) -> bool:
        """Rule 14: what is protected, or about to be, stays until something newer is."""
        return generation in (self.protected, self.copying)

    def may_overwrite_guest(self, slot: Slot) -> bool:
        """A guest slot is free unless it holds what is kept, or is being filled."""
        if slot.state != "sealed" or slot.generation is None:
            return slot.state == "empty"
        if slot.worthless or not self.is_eligible(slot.generation):
            return True
        return self.phase == "open" and not self.is_kept(slot.generation)

    # ------------------------------------------------------------------ rounds of copies

    def copies_wanted(self, message: CopiesWanted) -> None:
        """Keep what we have of this generation, and fetch what we should have."""
        generation = message.generation
        behind = self.copying is not None and generation < self.copying
        if not self.is_current_or_parent(generation) or behind:
            self.stale(message)
            return
        self.copying = generation
        for shard in message.shards:
            if shard.rank not in self.wards or shard.generation != generation:
                continue
            slot = self.guests_of(shard.rank).sealed(generation)
            if slot is not None and slot.shard is not None:
                self.tell(CopySealed(shard=slot.shard))
            elif (shard.rank, generation) not in self.fetches:
                self._fetch_ward(shard)
        for local in self.ranks.values():
            if local.attach is not None:
                self._say_kept(local, generation)

    def _say_kept(self, local: LocalRank, generation: Generation) -> None:
        """The original counts as a copy: it may have been overwritten before we were asked."""
        slot = local.slots.sealed(generation) or self.guests_of(local.rank).sealed(generation)
        if slot is not None and slot.shard is not None:
            self.tell(CopySealed(shard=slot.shard))
        else:
            reason = "its own was overwritten"
            self.tell(CopyFailed(owner=local.rank, generation=generation, reason=reason))

    def _fetch_ward(self, shard: HeldShard) -> None:
        for key in [key for key in self.fetches if key[0] == shard.rank]:
            self._abort_fetch(key, f"{shard.generation} is wanted")
        slot = self._guest_slot(shard.rank)
        if slot is not None:
            self._fetch(shard, from_node=self.nodes[shard.rank], slot=slot)
            return
        reason = "no guest slot is free"
        self.tell(CopyFailed(owner=shard.rank, generation=shard.generation, reason=reason))

    def copies_ended(self, message: CopiesEnded) -> None:
        """All copies are there, or they will not be."""
        generation = message.generation
        if not self.is_current_or_parent(generation):
            self.stale(message)
            return
        if self.copying is not None and self.copying <= generation:
            self.copying = None
        if message.protected:
            self._protect(generation)
        else:
            self._unprotect(generation, message.reason)
        self.free_guests()

    def _protect(self, generation: Generation) -> None:
        if self.protected is None or generation > self.protected:
            self.protected = generation
        if self.announced != generation:
            self.announced = generation
            self.emit(AnnounceProtected(generation=generation))

    def _unprotect(self, generation: Generation, reason: str) -> None:
        """With two slots, what is kept would leave none to save into: saving goes first."""
        for key in [key for key in self.fetches if key[1] == generation]:
            self._abort_fetch(key, reason)
        if any(local.slots.usable == GUEST_SLOTS for local in self.ranks.values()):
            self.protected = None
        if self.announced is not None or self.protected is None:
            self.announced = None
            self.emit(AnnounceProtected(generation=None, reason=reason))

    # ------------------------------------------------------------------ fetches

    def shard_fetched(self, event: ShardFetched) -> None:
        """The copy is complete: a ward is protected here, or a rank can be restored."""
        shard = event.shard
        key = (shard.rank, shard.generation)
        fetch = self.fetches.get(key)
        if fetch is None or fetch.slot != shard.slot:
            self.stale(event)
            return
        del self.fetches[key]
        self.guests[shard.rank].slots[shard.slot].seal(shard)
        if shard.rank in self.wards:
            self.tell(CopySealed(shard=shard))
        self.release_orders()

    def fetch_failed(self, event: FetchFailed) -> None:
        """Tried again when the coordinator asks again; a restore looks for another source."""
        key = (event.rank, event.generation)
        fetch = self.fetches.get(key)
        if fetch is None or fetch.slot != event.slot:
            self.stale(event)
            return
        del self.fetches[key]
        self.guests[event.rank].slots[event.slot].clear()
        order = self._waiting(key)
        if order is not None:
            self._no_copy(order, event.reason)
        elif event.final:
            self.tell(
                CopyFailed(owner=event.rank, generation=event.generation, reason=event.reason)
            )

    def restore_from_peer(self, order: RestoreOrdered) -> None:
        """Fetch the shard first; it may be here already, from an earlier attempt."""
        key = (order.rank, order.generation)
        node, shard = order.source.node, order.source.shard
        assert node is not None
        fetch = self.fetches.get(key)
        if self._copy_of(order) is not None or (fetch is not None and fetch.from_node == node):
            return
        for other in [other for other in self.fetches if other[0] == order.rank]:
            self._abort_fetch(other, "another source was chosen")
        slot = self._guest_slot(order.rank)
        if slot is None or shard is None or key != (shard.rank, shard.generation):
            self._no_copy(order, "no guest slot is free" if slot is None else "no shard is named")
        else:
            self._fetch(shard, from_node=node, slot=slot)

    def release_orders(self) -> None:
        """Let trainers read, once all that their node fetches is here."""
        if self.phase != "restoring":
            return
        for local in self.ranks.values():
            order = local.order
            if order is None or local.told or local.answer is not None:
                continue
            if all(self._is_here(rank, order) for rank in order.fetching):
                local.told = True
                self.emit(self._read(order))

    def _is_here(self, rank: int, order: RestoreOrdered) -> bool:
        slot = self.guests_of(rank).sealed(order.generation)
        return slot is not None and not slot.worthless

    def _copy_of(self, order: RestoreOrdered) -> HeldShard | None:
        slot = self.guests_of(order.rank).sealed(order.generation)
        return None if slot is None or slot.worthless else slot.shard

    def _read(self, order: RestoreOrdered) -> RestoreShard:
        """What the trainer is told: what was fetched is memory of this node."""
        source = order.source
        copy = self._copy_of(order) if source.kind == "peer" else None
        if copy is not None:
            source = ShardSource(kind="memory", slot=copy.slot, copied=True, root=copy.root)
        return RestoreShard(
            rank=order.rank,
            epoch=order.epoch,
            attempt=order.attempt,
            generation=order.generation,
            step=order.step,
            source=source,
            readers=order.readers,
        )

    def _waiting(self, key: Key) -> RestoreOrdered | None:
        """The order that this fetch is for."""
        local = self.ranks.get(key[0])
        if local is None or local.order is None or local.answer is not None:
            return None
        order = local.order
        fits = order.source.kind == "peer" and order.generation == key[1]
        return order if fits and self.phase == "restoring" else None

    def _no_copy(self, order: RestoreOrdered, reason: str) -> None:
        local = self.ranks[order.rank]
        local.answer = RankBad(
            rank=order.rank, epoch=order.epoch, attempt=order.attempt, detail=reason
        )
        self.tell(local.answer)

    def _fetch(self, shard: HeldShard, *, from_node: int, slot: Slot) -> None:
        assert self.incarnation is not None
        slot.begin(shard.generation, shard.step, self.incarnation)
        self.fetches[shard.rank, shard.generation] = Fetch(slot=slot.index, from_node=from_node)
        self.emit(FetchShard(shard=shard, from_node=from_node, slot=slot.index))

    def _abort_fetch(self, key: Key, reason: str) -> None:
        fetch = self.fetches.pop(key)
        rank, generation = key
        self.emit(AbortFetch(rank=rank, generation=generation, slot=fetch.slot, reason=reason))
        self.guests[rank].slots[fetch.slot].clear()

    def abort_fetches(self, reason: str) -> None:
        """Nothing of it is wanted any more."""
        for key in list(self.fetches):
            self._abort_fetch(key, reason)

    # ------------------------------------------------------------------ guest slots

    def guests_of(self, rank: int) -> Slots:
        """The guest slots of a rank, empty at first."""
        if rank not in self.guests:
            self.guests[rank] = Slots()
            self.guests[rank].resize(GUEST_SLOTS)
        return self.guests[rank]

    def _guest_slot(self, rank: int) -> Slot | None:
        """An empty one, else the oldest that may be overwritten; more while restoring."""
        guests = self.guests_of(rank)
        free = [slot for slot in guests.slots if self.may_overwrite_guest(slot)]
        if not free and self.phase == "restoring" and len(guests.slots) < MOST_GUEST_SLOTS:
            guests.resize(len(guests.slots) + 1)
            free = guests.slots[-1:]
        empty = [slot for slot in free if slot.generation is None]
        known = [(slot.generation, slot) for slot in free if slot.generation is not None]
        if empty:
            return empty[0]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    def free_guests(self) -> None:
        """Give back the memory of those who are no wards, once nothing in it is needed."""
        for rank, guests in list(self.guests.items()):
            if rank in self.wards or not all(self._is_passed(slot) for slot in guests.slots):
                continue
            del self.guests[rank]
            self.emit(FreeGuests(rank=rank))

    def _is_passed(self, slot: Slot) -> bool:
        newest = self.memory_committed
        if slot.state == "empty" or newest is None or slot.generation is None:
            return slot.state == "empty"
        passed = slot.generation < newest and not self.is_kept(slot.generation)
        return slot.state == "sealed" and passed
