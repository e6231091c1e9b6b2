"""The saving half of a keeper's protocol: slots, seals, shard files and votes of its ranks."""

from autockpt.executors.protocol.messages import (
    AbortPersist,
    AnnounceDropped,
    AnnounceDurable,
    AnnounceMemoryCommitted,
    DiscardSnapshot,
    DurableCommitted,
    GenerationDropped,
    GrantSlot,
    HeldShard,
    MemoryCommitted,
    PersistFailed,
    PersistStalled,
    PersistWanted,
    RankBegan,
    RankDropped,
    RankPrepared,
    RankSealed,
    Report,
    SaveRequested,
    ShardDiscarded,
    ShardPersisted,
    ShardSealed,
    SkipSave,
    StartPersist,
)
from autockpt.executors.protocol.node.replicating import NodeProtecting
from autockpt.executors.protocol.node.slots import Slot
from autockpt.executors.protocol.node.state import Key, LocalRank, Persist
from autockpt.values.generation import Generation


class NodeSaving(NodeProtecting):
    """Grants, seals, persists, votes; and what the coordinator's verdicts do to them."""

    # ------------------------------------------------------------------ rules

    def may_overwrite(self, local: LocalRank, slot: Slot) -> bool:
        """Rule 1: a slot is free only if all ranks hold something newer, this one included."""
        if slot.state != "sealed" or slot.generation is None or self.is_busy(local, slot):
            return slot.state == "empty"
        held = slot.generation
        if slot.worthless or not self.is_eligible(held):
            return True
        if slot.passed:
            return not self.is_on_its_way((local.rank, held))
        if self.is_kept(held) and local.slots.usable > 1:
            return False
        newer = self.memory_committed
        if newer is not None and newer > held and local.slots.sealed(newer) is not None:
            return True
        return self.is_superseded(local, held)

    def is_superseded(self, local: LocalRank, held: Generation) -> bool:
        """Rule 2: what was restored supersedes older memory, because its own sources stay.

        A single slot promises nothing: with no second copy beside the one that is being filled, the
        disk has to do, and what will not get there must not keep the next one from it.
        """
        if self.parent is not None and held < self.parent:
            return True
        return local.slots.usable == 1 and not self.is_on_its_way((local.rank, held))

    def is_on_its_way(self, key: Key) -> bool:
        """It may become durable yet: others may still seal it, or it is written, or voted for."""
        durable = self.durable is not None and key[1] <= self.durable
        return not durable and (key in self.unsettled or key in self.persists)

    def is_busy(self, local: LocalRank, slot: Slot) -> bool:
        """The slot is being written to storage, which does not hang."""
        persist = self.persists.get((local.rank, slot.generation)) if slot.generation else None
        return persist is not None and persist.record is None and not persist.stalled

    def save_refusal(self, event: SaveRequested) -> str | None:
        """Why this request cannot be granted whatever the slots hold; None: it can."""
        local = self.ranks.get(event.rank)
        if local is None or not self.is_current(event.generation):
            return f"fenced or not open: node is in term {self.term} ({self.phase})"
        if local.newest is not None and event.generation <= local.newest:
            return f"not newer than {local.newest}"
        return None

    def choose_slot(self, local: LocalRank) -> Slot | None:
        """An empty slot, else the oldest that may be overwritten."""
        free = [s for s in local.slots.slots[: local.slots.usable] if self.may_overwrite(local, s)]
        empty = [slot for slot in free if slot.generation is None]
        known = [slot for slot in free if slot.generation is not None]
        if empty:
            return empty[0]

        def cost(slot: Slot) -> tuple[bool, Generation]:
            assert slot.generation is not None
            return (local.rank, slot.generation) in self.persists, slot.generation

        return min(known, key=cost) if known else None

    # ------------------------------------------------------------------ events of the trainer

    def save_requested(self, event: SaveRequested) -> None:
        """Grant a slot or skip the save; never wait."""
        local = self.ranks.get(event.rank)
        if local is not None and self._joins(local, event):
            return
        refusal = self.save_refusal(event)
        slot = self.choose_slot(local) if local is not None and refusal is None else None
        fresh = local is not None and self._is_new(local, event.generation)
        if local is not None and fresh:
            local.newest = event.generation
        if local is not None and slot is not None:
            self._grant(local, slot, event)
            return
        reason = refusal or "no slot may be overwritten"
        self.emit(SkipSave(rank=event.rank, generation=event.generation, reason=reason))
        if fresh:  # a repeated request must not drop what was granted before
            self._drop(event.rank, event.generation, reason, memory=True)

    def _joins(self, local: LocalRank, event: SaveRequested) -> bool:
        """What was granted for memory alone goes to disk as well: the script asked for it since."""
        slot = local.slots.writing(event.generation)
        if slot is None or slot.doomed or not self.is_current(event.generation):
            return False
        rank, generation = event.rank, event.generation
        if (rank, generation) in self.persists:
            return event.disk
        if event.disk:
            self._persist(local, slot, sealed=False)
            self.tell(
                RankBegan(
                    rank=rank,
                    generation=generation,
                    step=event.step,
                    disk=True,
                    coming=self._coming(local, generation),
                )
            )
            return True
        return False

    def _is_new(self, local: LocalRank, generation: Generation) -> bool:
        later = local.newest is None or generation > local.newest
        return later and self.is_current(generation)

    def _grant(self, local: LocalRank, slot: Slot, event: SaveRequested) -> None:
        assert self.incarnation is not None
        self.overwritten(local, slot)
        slot.begin(event.generation, event.step, self.incarnation)
        rank, generation = event.rank, event.generation
        self.emit(GrantSlot(rank=rank, generation=generation, slot=slot.index))
        self.tell(
            RankBegan(
                rank=rank, generation=generation, step=event.step, disk=event.disk,
                coming=self._coming(local, generation),
            )
        )  # fmt: skip
        if event.disk:
            self._persist(local, slot, sealed=False)

    def overwritten(self, local: LocalRank, slot: Slot) -> None:
        """Rule 19: a verdict that did not come on what is gone is not waited for.

        Nor is a storage that hangs (rule 1).
        """
        if slot.generation is None:
            return
        key = (local.rank, slot.generation)
        self.unsettled.pop(key, None)
        if key in self.persists and self.persists[key].record is None:
            reason = "the storage hangs, and memory needs the slot"
            self._abort_persist(key, reason)
            self._drop(*key, reason, memory=False)

    def _coming(self, local: LocalRank, newest: Generation) -> tuple[Generation, ...]:
        """Older snapshots that are under way, or sealed and not yet answered."""
        writing = [s.generation for s in local.slots.slots if s.state == "writing" and not s.doomed]
        unsettled = [generation for rank, generation in self.unsettled if rank == local.rank]
        return tuple(sorted({g for g in (*writing, *unsettled) if g is not None and g < newest}))

    def shard_sealed(self, event: ShardSealed) -> None:
        """The slot is complete; tell the coordinator, and vote if the file is complete too."""
        local = self.ranks.get(event.rank)
        slot = local.slots.writing(event.generation) if local else None
        if local is None or slot is None:
            self.stale(event)
            return
        if slot.doomed or not self.is_current(event.generation):
            slot.clear()
            self.stale(event)
            return
        self._seal(local, slot, event)

    def _seal(self, local: LocalRank, slot: Slot, event: ShardSealed) -> None:
        shard = HeldShard(
            rank=event.rank,
            slot=slot.index,
            generation=event.generation,
            step=slot.step,
            world_size=len(self.nodes),
            root=event.root,
            layout_digest=event.layout_digest,
            bytes=event.bytes,
            chunk_bytes=event.chunk_bytes,
            health=event.health,
            replicas=event.replicas,
        )
        slot.seal(shard)
        slot.passed = not event.held
        key = (event.rank, event.generation)
        self.unsettled[key] = None
        self.tell(RankSealed(shard=shard))
        if key in self.persists:
            self.persists[key].sealed = True
            self._vote(key)

    def shard_discarded(self, event: ShardDiscarded) -> None:
        """A torn snapshot: the generation can never commit anywhere."""
        local = self.ranks.get(event.rank)
        if local is None:
            self.stale(event)
            return
        slot = local.slots.writing(event.generation) or local.slots.sealed(event.generation)
        if slot is None:
            self.stale(event)
            return
        if slot.state == "sealed":
            self.emit(Report(kind="violation", detail=f"discarded after the seal: {event}"))
        known = slot.doomed
        self._abort_persist((event.rank, event.generation), event.reason)
        self.unsettled.pop((event.rank, event.generation), None)
        slot.clear()
        if not known and self.is_current(event.generation):
            self._drop(event.rank, event.generation, event.reason, memory=True)

    def shard_persisted(self, event: ShardPersisted) -> None:
        """The file is complete: the slot is free again; vote if it is sealed."""
        persist = self._running((event.rank, event.generation), event.attempt)
        if persist is None:
            self.stale(event)
            return
        persist.record = event.record
        self._vote((event.rank, event.generation))

    def persist_failed(self, event: PersistFailed) -> None:
        """Try again under a new name from the slot, a limited number of times."""
        key = (event.rank, event.generation)
        persist = self._running(key, event.attempt)
        if persist is None:
            self.stale(event)
            return
        del self.persists[key]
        local = self.ranks[event.rank]
        slot = local.slots.sealed(event.generation) or local.slots.writing(event.generation)
        again = event.retryable and event.attempt < self.deadlines.persist_attempts
        if again and slot is not None and not slot.doomed:
            self._persist(local, slot, sealed=slot.state == "sealed")
        else:
            self._drop(event.rank, event.generation, event.reason, memory=False, full=event.full)

    def persist_stalled(self, event: PersistStalled) -> None:
        """It goes on, until a save finds no other slot."""
        persist = self._running((event.rank, event.generation), event.attempt)
        if persist is None:
            self.stale(event)
            return
        persist.stalled = True

    # ------------------------------------------------------------------ verdicts

    def memory_committed_heard(self, message: MemoryCommitted) -> None:
        """All ranks hold it; older slots may be overwritten if it is a healthy one."""
        generation = message.generation
        if not self.is_current(generation):
            self.stale(message)
            return
        news = [key for key in self.unsettled if key[1] == generation]
        for key in news:
            del self.unsettled[key]
        if message.health != "good":
            self.doubt(generation)
        elif self.memory_committed is None or generation > self.memory_committed:
            self.memory_committed = generation
        if news:
            self.emit(AnnounceMemoryCommitted(generation=generation))
        self.free_guests()

    def doubt(self, generation: Generation) -> None:
        """Rule 16: it will never be chosen by itself, so it displaces nothing, and may go."""
        for slots in (*(local.slots for local in self.ranks.values()), *self.guests.values()):
            slot = slots.sealed(generation)
            if slot is not None:
                slot.worthless = True
        if self.memory_committed == generation:
            self.memory_committed = None
        if self.durable == generation:
            self.durable = None
        if self.protected == generation:
            self.unprotect(f"{generation} is suspect")

    def durable_heard(self, message: DurableCommitted) -> None:
        """The commit stands on disk."""
        if not self.is_current(message.generation):
            self.stale(message)
            return
        generation = message.generation
        awaited = any(key[1] == generation for key in self.votes)
        newest = self.durable is None or generation > self.durable
        self._settle(generation, memory=True)
        if newest:
            self.durable = generation
            held = {(r.rank, s.generation) for r in self.ranks.values() for s in r.slots.slots}
            # What is in a slot may be written once more, should this turn out to be suspect.
            self.attempts = {
                k: n for k, n in self.attempts.items() if k[1] > generation or k in held
            }
        if newest or awaited:
            self.emit(AnnounceDurable(generation=generation))

    def dropped_heard(self, message: GenerationDropped) -> None:
        """It will never commit (to memory, or only to disk): free what it occupies."""
        generation = message.generation
        if not self.is_current(generation):
            self.stale(message)
            return
        concerned = any(key[1] == generation for key in (*self.persists, *self.drops))
        for key in [key for key in self.persists if key[1] == generation]:
            self._abort_persist(key, message.reason)
        self._settle(generation, memory=message.memory)
        if message.memory:
            concerned |= self._drop_memory(generation, message.reason)
        if concerned:
            self.emit(AnnounceDropped(generation=generation, reason=message.reason))

    def _drop_memory(self, generation: Generation, reason: str) -> bool:
        found = False
        for local in self.ranks.values():
            self.unsettled.pop((local.rank, generation), None)
            sealed, writing = local.slots.sealed(generation), local.slots.writing(generation)
            if sealed is not None:
                sealed.clear()
            if writing is not None and not writing.doomed:
                writing.doomed = True
                self.emit(DiscardSnapshot(rank=local.rank, generation=generation, reason=reason))
            found |= sealed is not None or writing is not None
        return found

    def persist_wanted(self, message: PersistWanted) -> None:
        """Write what this node has of these shards, sealed or under way, trainers or not."""
        settled = self.durable is not None and message.generation <= self.durable
        if settled or not self.is_current(message.generation):
            self.stale(message)
            return
        for local in self.ranks.values():
            key = (local.rank, message.generation)
            known = key in self.persists or key in self.drops
            if local.attach is None or known or local.rank not in message.ranks:
                continue
            slot = local.slots.sealed(message.generation) or local.slots.writing(message.generation)
            if slot is None or slot.doomed:
                self._drop(*key, "not in memory any more", memory=False)
            else:
                self._persist(local, slot, sealed=slot.state == "sealed")

    # ------------------------------------------------------------------ helpers

    def _persist(self, local: LocalRank, slot: Slot, *, sealed: bool) -> None:
        assert slot.generation is not None
        key = (local.rank, slot.generation)
        attempt = self.next_attempt(key)
        self.attempts[key] = attempt
        self.persists[key] = Persist(
            slot=slot.index, step=slot.step, attempt=attempt, sealed=sealed
        )
        self.emit(
            StartPersist(
                rank=local.rank, generation=slot.generation, slot=slot.index, attempt=attempt
            )
        )

    def next_attempt(self, key: Key) -> int:
        """Rule 12: a file name is used once."""
        return self.attempts.get(key, 0) + 1

    def _running(self, key: Key, attempt: int) -> Persist | None:
        persist = self.persists.get(key)
        if persist is None or persist.record is not None or persist.attempt != attempt:
            return None
        return persist

    def _vote(self, key: Key) -> None:
        persist = self.persists[key]
        if not persist.sealed or persist.record is None:
            return
        vote = RankPrepared(
            rank=key[0], generation=key[1], step=persist.step, record=persist.record
        )
        self.votes[key] = vote
        self.tell(vote)

    def _drop(
        self, rank: int, generation: Generation, reason: str, *, memory: bool, full: bool = False
    ) -> None:
        drop = RankDropped(
            rank=rank, generation=generation, reason=reason, memory=memory, full=full
        )
        self.drops[rank, generation] = drop
        self.tell(drop)

    def _abort_persist(self, key: Key, reason: str) -> None:
        persist = self.persists.pop(key, None)
        self.votes.pop(key, None)
        if persist is not None and persist.record is None:
            self.emit(AbortPersist(rank=key[0], generation=key[1], reason=reason))

    def _settle(self, generation: Generation, *, memory: bool) -> None:
        """A verdict came: what it answers need not be repeated, what still writes must stop.

        A shard may be durable while it is written once more: a new keeper does not know that the
        old one had voted.
        """
        for key in [key for key in self.votes if key[1] == generation]:
            del self.votes[key]
        for key in [key for key in self.persists if key[1] == generation]:
            self._abort_persist(key, "settled")
        for key, drop in list(self.drops.items()):
            if key[1] == generation and (memory or not drop.memory):
                del self.drops[key]
