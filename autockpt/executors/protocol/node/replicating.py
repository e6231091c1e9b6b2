"""The protecting part of a keeper's protocol: copies of other nodes' shards, and their parities.

One mechanism serves three purposes.  A shard that is sealed elsewhere is *fetched* into a guest
slot: to protect it (the coordinator wants copies of a generation), to restore from it (the rank
lives here now, its memory is there), to protect it again after a loss.  Who fetches decides when;
who is asked only keeps the slot, until the round of copies ends.

Parity is the same with several sources: encoded from the shards of a set to protect them, and
added up with what is left of a set to rebuild a lost one.
"""

from dataclasses import replace

from autockpt.executors.protocol.messages import (
    AbortFetch,
    AnnounceProtected,
    CopiesEnded,
    CopiesWanted,
    CopyComing,
    CopyFailed,
    CopySealed,
    FetchFailed,
    FetchShard,
    FreeGuests,
    FreeSlots,
    HeldShard,
    KeepOutgrown,
    RankBad,
    RestoreOrdered,
    RestoreShard,
    ServeShards,
    ShardComing,
    ShardCopy,
    ShardFetched,
    ShardSource,
    ShardsPlaced,
    SlotsOutgrown,
)
from autockpt.executors.protocol.node.slots import Slot, Slots
from autockpt.executors.protocol.node.state import Fetch, Guest, LocalRank, NodeState
from autockpt.values.generation import Generation

FEW_SLOTS = 2
"""Of a rank: what is protected in one, the newest in the other, and none to save into."""
GUEST_SLOTS = 2
"""Of each ward or parity: the newest protected generation, and the one that is arriving."""
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
        for shard in (*message.shards, *message.parities):
            fits = (shard.generation, shard.world_size) == (generation, len(self.nodes))
            if fits and self.is_wanted(guest_of(shard)):
                self._have(shard)
        for local in self.ranks.values():
            if local.attach is not None:
                self._say_kept(local, generation)

    def _say_kept(self, local: LocalRank, generation: Generation) -> None:
        """The original counts as a copy: it may have been overwritten before we were asked."""
        copies = self.guests_of((local.rank, False))
        slot = local.slots.sealed(generation) or copies.sealed(generation)
        if slot is not None and slot.shard is not None:
            self.tell(CopySealed(shard=slot.shard))
        else:
            reason = "its own was overwritten"
            self.tell(CopyFailed(owner=local.rank, generation=generation, reason=reason))

    def _have(self, shard: HeldShard) -> None:
        """Say that it is here, or begin to bring it here."""
        guest, generation = guest_of(shard), shard.generation
        here, fetch = self._sealed_guest(shard), self.fetches.get(guest)
        if here is not None:
            self.tell(CopySealed(shard=here))
        elif fetch is None or fetch.generation != generation:
            self._abort_fetch(guest, f"{generation} is wanted")
            slot = self._guest_slot(guest)
            if slot is not None:
                self._fetch(shard, self._sources(shard), slot)
                return
            reason = "no guest slot is free"
            self.tell(CopyFailed(owner=shard.rank, generation=generation, reason=reason))
        elif fetch.mark:
            rank, parity = guest
            self.tell(CopyComing(owner=rank, generation=generation, mark=fetch.mark, parity=parity))

    def _sealed_guest(self, shard: HeldShard) -> HeldShard | None:
        """The copy, or the parity of the very same shards."""
        held = self.guests_of(guest_of(shard)).held()
        fits = (h for h in held if h.generation == shard.generation and h.parity == shard.parity)
        return next(fits, None)

    def _sources(self, shard: HeldShard) -> tuple[ShardCopy, ...]:
        """A ward is fetched from its owner, a parity is made of what the other members own."""
        if shard.parity is None:
            return (ShardCopy(node=self.nodes[shard.rank], shard=shard),)
        others = [m.rank for m in shard.parity.members if m.rank != shard.rank]
        return tuple(ShardCopy(node=self.nodes[r], shard=shard.of_member(r)) for r in others)

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
            self._copies_failed(generation, message.reason)
        self.free_guests()

    def _protect(self, generation: Generation) -> None:
        if self.protected is None or generation > self.protected:
            self.protected = generation
        if self.announced != generation:
            self.announced = generation
            self.emit(AnnounceProtected(generation=generation))

    def _copies_failed(self, generation: Generation, reason: str) -> None:
        """Where a rank has few slots what is kept would leave none: saving goes first."""
        for guest in [g for g, fetch in self.fetches.items() if fetch.generation == generation]:
            self._abort_fetch(guest, reason)
        if any(local.slots.usable == FEW_SLOTS for local in self.ranks.values()):
            self.unprotect(reason)
        elif self.announced is not None or self.protected is None:
            self._announce_loss(reason)

    def unprotect(self, reason: str) -> None:
        """Nothing is kept any more for the loss of a node."""
        self.protected = None
        self._announce_loss(reason)

    def _announce_loss(self, reason: str) -> None:
        self.announced = None
        self.emit(AnnounceProtected(generation=None, reason=reason))

    # ------------------------------------------------------------------ fetches

    def shard_coming(self, event: ShardComing) -> None:
        """How far it has come; the coordinator hears of it when it asks again."""
        fetch = self.fetches.get((event.rank, event.parity))
        if fetch is None or (fetch.slot, fetch.generation) != (event.slot, event.generation):
            self.stale(event)
            return
        fetch.mark = event.mark

    def shard_fetched(self, event: ShardFetched) -> None:
        """It is complete: a ward or a set is protected here, or a rank can be restored."""
        shard = event.shard
        guest = guest_of(shard)
        fetch = self.fetches.get(guest)
        if fetch is None or (fetch.slot, fetch.generation) != (shard.slot, shard.generation):
            self.stale(event)
            return
        del self.fetches[guest]
        for slot in self.guests[guest].slots:
            if slot.state == "sealed" and slot.generation == shard.generation:
                slot.worthless = True  # of another set: one of each generation is enough
        self.guests[guest].slots[shard.slot].seal(shard)
        if self.is_wanted(guest):
            self.tell(CopySealed(shard=shard))
        self.release_orders()

    def fetch_failed(self, event: FetchFailed) -> None:
        """Tried again when the coordinator asks again; a restore looks for another source."""
        guest = (event.rank, event.parity)
        fetch = self.fetches.get(guest)
        if fetch is None or (fetch.slot, fetch.generation) != (event.slot, event.generation):
            self.stale(event)
            return
        del self.fetches[guest]
        self.guests[guest].slots[event.slot].clear()
        waiting = [] if event.parity else self._waiting(event.rank, event.generation)
        for order in waiting:
            self._no_copy(order, event.reason)
        if event.final and not waiting:
            self.tell(
                CopyFailed(owner=event.rank, generation=event.generation, reason=event.reason)
            )

    def bring(self, order: RestoreOrdered) -> None:
        """Fetch or rebuild the shard first."""
        shard = order.source.shard
        named = shard is not None and shard.rank == order.rank
        if not named or not self._bring(order.source, order.generation):
            self._no_copy(order, "no guest slot is free" if named else "no shard is named")

    def _bring(self, source: ShardSource, generation: Generation) -> bool:
        """It is or will be here, maybe since an earlier attempt; False: there is no slot for it."""
        shard = source.shard
        if shard is None or shard.generation != generation:
            return False
        guest = guest_of(shard)
        fetch = self.fetches.get(guest)
        under_way = fetch is not None and fetch.sources == source.brought
        if self._copy_of(shard.rank, generation) is not None or under_way:
            return True
        self._abort_fetch(guest, "another source was chosen")
        slot = self._guest_slot(guest)
        if slot is not None:
            self._fetch(shard, source.brought, slot)
        return slot is not None

    def shards_placed(self, message: ShardsPlaced) -> None:
        """What ranks of this node are about to gather: lend it, and rebuild our part first."""
        fits = (message.incarnation, message.term) == (self.incarnation, self.term)
        known = self.placed is not None and message.attempt <= self.placed.attempt
        if not fits or self.phase != "restoring" or known:
            self.stale(message)
            return
        self.placed = message
        lent = ServeShards(
            term=message.term, attempt=message.attempt, generation=message.generation,
            places=message.places, rebuilt=message.rebuilt,
        )  # fmt: skip
        self.emit(lent)
        for source in message.rebuilds_at(self.node):
            self._bring(source, message.generation)

    def release_orders(self) -> None:
        """Let trainers read, once all that their node fetches is here."""
        if self.phase != "restoring":
            return
        for local in self.ranks.values():
            order = local.order
            if order is None or local.told or local.answer is not None:
                continue
            if self._is_ready(order):
                local.told = True
                self.emit(self._read(order))

    def _is_ready(self, order: RestoreOrdered) -> bool:
        if order.source.kind == "gather":
            return self._is_placed(order)
        return all(self._copy_of(rank, order.generation) is not None for rank in order.fetching)

    def gather(self, order: RestoreOrdered) -> None:
        """Nothing to begin: `shards_placed` did; say so if that came to nothing."""
        ranks = self._rebuilt_for(order) or ()
        for rank in ranks:
            if self._copy_of(rank, order.generation) is None and (rank, False) not in self.fetches:
                self._no_copy(order, f"the shard of rank {rank} could not be rebuilt here")
                return

    def _is_placed(self, order: RestoreOrdered) -> bool:
        """Where to gather from is known, and what this node rebuilds for it is there."""
        ranks = self._rebuilt_for(order)
        if ranks is None:
            return False
        return all(self._copy_of(rank, order.generation) is not None for rank in ranks)

    def _rebuilt_for(self, order: RestoreOrdered) -> list[int] | None:
        """Ranks whose shards this node rebuilds for all that gather; None: not known yet."""
        placed = self.placed
        if placed is None or (placed.term, placed.attempt) != (order.term, order.attempt):
            return None
        mine = placed.rebuilds_at(self.node)
        return [source.shard.rank for source in mine if source.shard is not None]

    def _copy_of(self, rank: int, generation: Generation) -> HeldShard | None:
        slot = self.guests_of((rank, False)).sealed(generation)
        return None if slot is None or slot.worthless else slot.shard

    def _read(self, order: RestoreOrdered) -> RestoreShard:
        """What the trainer is told: what was fetched is memory of this node."""
        source = order.source
        copy = self._copy_of(order.rank, order.generation) if source.brought else None
        if copy is not None:
            source = ShardSource(
                kind="memory", slot=copy.slot, copied=True, rebuilt=source.kind == "parity",
                root=copy.root,
            )  # fmt: skip
        return RestoreShard(
            rank=order.rank,
            term=order.term,
            attempt=order.attempt,
            generation=order.generation,
            step=order.step,
            source=source,
            readers=order.readers,
        )

    def _waiting(self, rank: int, generation: Generation) -> list[RestoreOrdered]:
        """Orders that this fetch is for: of the rank itself, or of all that gather its shard."""
        if self.phase != "restoring":
            return []
        unanswered = [local.order for local in self.ranks.values() if local.answer is None]
        return [
            order
            for order in unanswered
            if order is not None
            and order.generation == generation
            and (order.source.kind == "gather" or (order.source.brought and order.rank == rank))
        ]

    def _no_copy(self, order: RestoreOrdered, reason: str) -> None:
        local = self.ranks[order.rank]
        local.answer = RankBad(
            rank=order.rank, term=order.term, attempt=order.attempt, detail=reason
        )
        self.tell(local.answer)

    def _fetch(self, shard: HeldShard, sources: tuple[ShardCopy, ...], slot: Slot) -> None:
        assert self.incarnation is not None
        slot.begin(shard.generation, shard.step, self.incarnation)
        self.fetches[guest_of(shard)] = Fetch(
            slot=slot.index, generation=shard.generation, sources=sources
        )
        self.emit(FetchShard(shard=shard, sources=sources, slot=slot.index))

    def _abort_fetch(self, guest: Guest, reason: str) -> None:
        fetch = self.fetches.pop(guest, None)
        if fetch is None:
            return
        rank, parity = guest
        self.emit(
            AbortFetch(
                rank=rank, generation=fetch.generation, slot=fetch.slot, reason=reason,
                parity=parity,
            )
        )  # fmt: skip
        self.guests[guest].slots[fetch.slot].clear()

    def abort_fetches(self, reason: str) -> None:
        """Nothing of it is wanted any more."""
        for guest in list(self.fetches):
            self._abort_fetch(guest, reason)

    # ------------------------------------------------------------------ guest slots

    def is_wanted(self, guest: Guest) -> bool:
        """Rounds of copies bring it here."""
        rank, parity = guest
        return rank in (self.holders if parity else self.wards)

    def guests_of(self, guest: Guest) -> Slots:
        """The slots for copies of a rank's shard, or for its parities; empty at first."""
        if guest not in self.guests:
            self.guests[guest] = Slots()
            self.guests[guest].resize(GUEST_SLOTS)
        return self.guests[guest]

    def outgrown(self, event: SlotsOutgrown) -> None:
        """Rule 2 for a rank of another world: what it restored from stays until something newer is
        memory-committed, as guests do, although new slots take its place."""
        local = self.ranks.get(event.rank)
        guest = (event.rank, False)
        if local is None or event.tight:
            if guest in self.guests and guest not in self.fetches and not self.is_wanted(guest):
                del self.guests[guest]
                self.emit(FreeGuests(rank=event.rank))
            return
        for slot in local.slots.slots:
            shard = slot.shard
            if shard is None or slot.worthless or not self._is_outgrown_parent(shard):
                continue
            free = self._guest_slot(guest)
            if free is not None and self._copy_of(shard.rank, shard.generation) is None:
                kept = replace(shard, slot=free.index, copied=True)
                free.adopt(kept)
                self.emit(KeepOutgrown(rank=event.rank, slot=slot.index, guest_slot=free.index))

    def _is_outgrown_parent(self, shard: HeldShard) -> bool:
        newer = self.memory_committed is not None and self.memory_committed > shard.generation
        return shard.world_size != len(self.nodes) and shard.generation == self.parent and not newer

    def _guest_slot(self, guest: Guest) -> Slot | None:
        """An empty one, else the oldest that may be overwritten; more while restoring."""
        guests = self.guests_of(guest)
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
        """Give back the memory of what does not belong here, once nothing in it is needed."""
        for guest, slots in list(self.guests.items()):
            if self.is_wanted(guest) or not all(self._is_passed(slot) for slot in slots.slots):
                continue
            del self.guests[guest]
            self.emit(FreeGuests(rank=guest[0], parity=guest[1]))
        for rank, local in list(self.ranks.items()):
            if local.attach is None and all(self._is_passed(slot) for slot in local.slots.slots):
                del self.ranks[rank]
                self.emit(FreeSlots(rank=rank))

    def _is_passed(self, slot: Slot) -> bool:
        newest = self.memory_committed
        if slot.state == "empty" or newest is None or slot.generation is None:
            return slot.state == "empty"
        passed = slot.generation < newest and not self.is_kept(slot.generation)
        return slot.state == "sealed" and passed


def guest_of(shard: HeldShard) -> Guest:
    """Whose guest slots it belongs in."""
    return shard.rank, shard.parity is not None
