"""The saving half of a keeper's protocol: slots, seals, shard files and votes of its ranks."""

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.node.replica_slots import ReplicaSlots
from autockpt.executors.protocol.node.replicating import Replicating
from autockpt.executors.protocol.node.slots import Slot
from autockpt.executors.protocol.node.state import Key, LocalRank, NodeState, Persist
from autockpt.values.generation import Generation
from autockpt.values.telemetry import NO_SLOT


class Saving:
    """Grants slots, counts seals and files, votes, and carries out the coordinator's verdicts."""

    def __init__(
        self, state: NodeState, replica_slots: ReplicaSlots, replicating: Replicating
    ) -> None:
        self.state = state
        self.replica_slots = replica_slots
        self.replicating = replicating

    # ------------------------------------------------------------------ rules

    def may_overwrite(self, local: LocalRank, slot: Slot) -> bool:
        """Rule 1: a slot is free only if all ranks hold something newer, this one included."""
        if slot.state != "sealed" or slot.generation is None or self.is_busy(local, slot):
            return slot.state == "empty"
        held = slot.generation
        if slot.worthless or not self.state.is_eligible(held):
            return True
        if slot.passed:
            return not self.is_on_its_way((local.rank, held))
        if self.replica_slots.is_kept(held) and local.slots.usable > 1:
            return False
        newer = self.state.memory_committed
        if newer is not None and newer > held and local.slots.sealed(newer) is not None:
            return True
        return self.is_superseded(local, held)

    def is_superseded(self, local: LocalRank, held: Generation) -> bool:
        """Rule 2: a restored generation supersedes older memory, because its own sources stay.

        A single slot promises nothing: there is no second copy beside the one being filled, so the
        disk has to do.  A shard that will not get to disk must not keep out the next one.
        """
        if self.state.parent is not None and held < self.state.parent:
            return True
        return local.slots.usable == 1 and not self.is_on_its_way((local.rank, held))

    def is_on_its_way(self, key: Key) -> bool:
        """It may become durable yet: others may still seal it, or it is written, or voted for."""
        state = self.state
        durable = state.durable is not None and key[1] <= state.durable
        return not durable and (key in state.unsettled or key in state.persists)

    def is_busy(self, local: LocalRank, slot: Slot) -> bool:
        """The slot is being written to storage, which does not hang."""
        persist = (
            self.state.persists.get((local.rank, slot.generation)) if slot.generation else None
        )
        return persist is not None and persist.record is None and not persist.stalled

    def save_refusal(self, event: m.SaveRequested) -> str | None:
        """Return why this request cannot be granted in any state of the slots; None: it can."""
        state = self.state
        local = state.ranks.get(event.rank)
        if local is None or not state.is_current(event.generation):
            return f"fenced or not open: node is in term {state.term} ({state.phase})"
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
            return (local.rank, slot.generation) in self.state.persists, slot.generation

        return min(known, key=cost) if known else None

    # ------------------------------------------------------------------ events of the trainer

    def save_requested(self, event: m.SaveRequested) -> None:
        """Grant a slot or skip the save; never wait."""
        attempt = event.generation.attempt
        self.state.newest_attempt = max(self.state.newest_attempt, attempt)
        local = self.state.ranks.get(event.rank)
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
        reason = refusal or NO_SLOT
        self.state.emit(m.SkipSave(rank=event.rank, generation=event.generation, reason=reason))
        if fresh:  # a repeated request must not drop what was granted before
            self.drop(event.rank, event.generation, reason, memory=True)

    def _joins(self, local: LocalRank, event: m.SaveRequested) -> bool:
        """A grant for memory alone goes to disk as well: the script has asked for it since."""
        slot = local.slots.writing(event.generation)
        if slot is None or slot.doomed or not self.state.is_current(event.generation):
            return False
        rank, generation = event.rank, event.generation
        if (rank, generation) in self.state.persists:
            return event.disk
        if event.disk:
            self._persist(local, slot, sealed=False)
            self.state.tell(
                m.RankBegan(
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
        return later and self.state.is_current(generation)

    def _grant(self, local: LocalRank, slot: Slot, event: m.SaveRequested) -> None:
        state = self.state
        assert state.incarnation is not None
        self.overwritten(local, slot)
        slot.begin(event.generation, event.step, state.incarnation)
        rank, generation = event.rank, event.generation
        state.emit(m.GrantSlot(rank=rank, generation=generation, slot=slot.index))
        state.tell(
            m.RankBegan(
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
        self.state.unsettled.pop(key, None)
        if key in self.state.persists and self.state.persists[key].record is None:
            reason = "the storage hangs, and memory needs the slot"
            self.abort_persist(key, reason)
            self.drop(*key, reason, memory=False)

    def _coming(self, local: LocalRank, newest: Generation) -> tuple[Generation, ...]:
        """Older snapshots that are under way, or sealed and not yet answered."""
        writing = [s.generation for s in local.slots.slots if s.state == "writing" and not s.doomed]
        unsettled = [generation for rank, generation in self.state.unsettled if rank == local.rank]
        return tuple(sorted({g for g in (*writing, *unsettled) if g is not None and g < newest}))

    def shard_sealed(self, event: m.ShardSealed) -> None:
        """The slot is complete; tell the coordinator, and vote if the file is complete too."""
        state = self.state
        local = state.ranks.get(event.rank)
        slot = local.slots.writing(event.generation) if local else None
        if local is None or slot is None:
            state.stale(event)
            return
        if slot.doomed or not state.is_current(event.generation):
            slot.clear()
            state.stale(event)
            return
        self._seal(local, slot, event)

    def _seal(self, local: LocalRank, slot: Slot, event: m.ShardSealed) -> None:
        state = self.state
        shard = m.HeldShard(
            rank=event.rank,
            slot=slot.index,
            generation=event.generation,
            step=slot.step,
            world_size=len(state.nodes),
            root=event.root,
            layout_digest=event.layout_digest,
            across_nodes=event.across_nodes,
            bytes=event.bytes,
            chunk_bytes=event.chunk_bytes,
            health=event.health,
            replicas=event.replicas,
        )
        slot.seal(shard)
        slot.passed = not event.held
        key = (event.rank, event.generation)
        state.unsettled[key] = None
        state.tell(m.RankSealed(shard=shard))
        if key in state.persists:
            state.persists[key].sealed = True
            self._vote(key)

    def shard_discarded(self, event: m.ShardDiscarded) -> None:
        """A torn snapshot: the generation can never commit anywhere."""
        state = self.state
        local = state.ranks.get(event.rank)
        if local is None:
            state.stale(event)
            return
        slot = local.slots.writing(event.generation) or local.slots.sealed(event.generation)
        if slot is None:
            state.stale(event)
            return
        if slot.state == "sealed":
            state.emit(m.Report(kind="violation", detail=f"discarded after the seal: {event}"))
        known = slot.doomed
        self.abort_persist((event.rank, event.generation), event.reason)
        state.unsettled.pop((event.rank, event.generation), None)
        slot.clear()
        if not known and state.is_current(event.generation):
            self.drop(event.rank, event.generation, event.reason, memory=True)

    def shard_persisted(self, event: m.ShardPersisted) -> None:
        """The file is complete: the slot is free again; vote if it is sealed."""
        persist = self._running((event.rank, event.generation), event.attempt)
        if persist is None:
            self.state.stale(event)
            return
        persist.record = event.record
        self._vote((event.rank, event.generation))

    def persist_failed(self, event: m.PersistFailed) -> None:
        """Try again under a new name from the slot, a limited number of times."""
        state = self.state
        key = (event.rank, event.generation)
        persist = self._running(key, event.attempt)
        if persist is None:
            state.stale(event)
            return
        del state.persists[key]
        local = state.ranks[event.rank]
        slot = local.slots.sealed(event.generation) or local.slots.writing(event.generation)
        again = event.retryable and event.attempt < state.deadlines.persist_attempts
        if again and slot is not None and not slot.doomed:
            self._persist(local, slot, sealed=slot.state == "sealed")
        else:
            self.drop(event.rank, event.generation, event.reason, memory=False, full=event.full)

    def persist_stalled(self, event: m.PersistStalled) -> None:
        """It goes on, until a save finds no other slot."""
        persist = self._running((event.rank, event.generation), event.attempt)
        if persist is None:
            self.state.stale(event)
            return
        persist.stalled = True

    def breakpoint_requested(self, event: m.BreakpointRequested) -> None:
        """The end is near: ask for the newest memory commit to be made durable."""
        state = self.state
        if state.incarnation is not None and state.phase == "open":
            state.relay(event)

    # ------------------------------------------------------------------ verdicts

    def memory_committed(self, message: m.MemoryCommitted) -> None:
        """All ranks hold it; older slots may be overwritten if it is a healthy one."""
        state = self.state
        generation = message.generation
        if not state.is_current(generation):
            state.stale(message)
            return
        news = [key for key in state.unsettled if key[1] == generation]
        for key in news:
            del state.unsettled[key]
        if message.dispute is not None and news:
            state.emit(m.AnnounceDispute(generation=generation, dispute=message.dispute))
        if message.health != "good":
            self.doubt(generation)
        elif state.memory_committed is None or generation > state.memory_committed:
            state.memory_committed = generation
        if news:
            state.emit(m.AnnounceMemoryCommitted(generation=generation))
        self.replica_slots.free_replicas()

    def doubt(self, generation: Generation) -> None:
        """Rule 16: it will never be chosen by itself, so it displaces nothing, and may go."""
        state = self.state
        for slots in (
            *(local.slots for local in state.ranks.values()),
            *state.replicas.values(),
        ):
            slot = slots.sealed(generation)
            if slot is not None:
                slot.worthless = True
        if state.memory_committed == generation:
            state.memory_committed = None
        if state.durable == generation:
            state.durable = None
        if state.protected == generation:
            self.replicating.unprotect(f"{generation} is suspect")

    def durable_committed(self, message: m.DurableCommitted) -> None:
        """The commit stands on disk."""
        state = self.state
        if not state.is_current(message.generation):
            state.stale(message)
            return
        generation = message.generation
        awaited = any(key[1] == generation for key in state.votes)
        newest = state.durable is None or generation > state.durable
        self._settle(generation, memory=True)
        if newest:
            state.durable = generation
            held = {(r.rank, s.generation) for r in state.ranks.values() for s in r.slots.slots}
            # What is in a slot may be written once more, should this turn out to be suspect.
            state.attempts = {
                k: n for k, n in state.attempts.items() if k[1] > generation or k in held
            }
        if newest or awaited:
            state.emit(m.AnnounceDurable(generation=generation))

    def generation_dropped(self, message: m.GenerationDropped) -> None:
        """It will never commit (to memory, or only to disk): free what it occupies."""
        state = self.state
        generation = message.generation
        if not state.is_current(generation):
            state.stale(message)
            return
        concerned = any(key[1] == generation for key in (*state.persists, *state.drops))
        for key in [key for key in state.persists if key[1] == generation]:
            self.abort_persist(key, message.reason)
        self._settle(generation, memory=message.memory)
        if message.memory:
            concerned |= self._drop_memory(generation, message.reason)
        if concerned:
            state.emit(m.AnnounceDropped(generation=generation, reason=message.reason))

    def _drop_memory(self, generation: Generation, reason: str) -> bool:
        found = False
        for local in self.state.ranks.values():
            self.state.unsettled.pop((local.rank, generation), None)
            sealed, writing = local.slots.sealed(generation), local.slots.writing(generation)
            if sealed is not None:
                sealed.clear()
            if writing is not None and not writing.doomed:
                writing.doomed = True
                self.state.emit(
                    m.DiscardSnapshot(rank=local.rank, generation=generation, reason=reason)
                )
            found |= sealed is not None or writing is not None
        return found

    def persist_wanted(self, message: m.PersistWanted) -> None:
        """Write what this node has of these shards, sealed or under way, trainers or not."""
        state = self.state
        settled = state.durable is not None and message.generation <= state.durable
        if settled or not state.is_current(message.generation):
            state.stale(message)
            return
        for local in state.ranks.values():
            key = (local.rank, message.generation)
            known = key in state.persists or key in state.drops
            if local.attach is None or known or local.rank not in message.ranks:
                continue
            slot = local.slots.sealed(message.generation) or local.slots.writing(message.generation)
            if slot is None or slot.doomed:
                self.drop(*key, "not in memory any more", memory=False)
            else:
                self._persist(local, slot, sealed=slot.state == "sealed")

    def await_verdicts(self, local: LocalRank) -> None:
        """Shards that an earlier keeper left may still become a memory commit."""
        state = self.state
        for shard in local.slots.restorable_shards():
            newer = state.memory_committed is None or shard.generation > state.memory_committed
            if state.is_current(shard.generation) and newer:
                state.unsettled[shard.rank, shard.generation] = None

    # ------------------------------------------------------------------ helpers

    def _persist(self, local: LocalRank, slot: Slot, *, sealed: bool) -> None:
        assert slot.generation is not None
        key = (local.rank, slot.generation)
        attempt = self.next_attempt(key)
        self.state.attempts[key] = attempt
        self.state.persists[key] = Persist(
            slot=slot.index, step=slot.step, attempt=attempt, sealed=sealed
        )
        self.state.emit(
            m.StartPersist(
                rank=local.rank, generation=slot.generation, slot=slot.index, attempt=attempt
            )
        )

    def next_attempt(self, key: Key) -> int:
        """Rule 12: a file name is used once."""
        return self.state.attempts.get(key, 0) + 1

    def _running(self, key: Key, attempt: int) -> Persist | None:
        persist = self.state.persists.get(key)
        if persist is None or persist.record is not None or persist.attempt != attempt:
            return None
        return persist

    def _vote(self, key: Key) -> None:
        persist = self.state.persists[key]
        if not persist.sealed or persist.record is None:
            return
        vote = m.RankPrepared(
            rank=key[0], generation=key[1], step=persist.step, record=persist.record
        )
        self.state.votes[key] = vote
        self.state.tell(vote)

    def drop(
        self, rank: int, generation: Generation, reason: str, *, memory: bool, full: bool = False
    ) -> None:
        drop = m.RankDropped(
            rank=rank, generation=generation, reason=reason, memory=memory, full=full
        )
        self.state.drops[rank, generation] = drop
        self.state.tell(drop)

    def abort_persist(self, key: Key, reason: str) -> None:
        persist = self.state.persists.pop(key, None)
        self.state.votes.pop(key, None)
        if persist is not None and persist.record is None:
            self.state.emit(m.AbortPersist(rank=key[0], generation=key[1], reason=reason))

    def _settle(self, generation: Generation, *, memory: bool) -> None:
        """Handle a verdict: stop the messages that it answers, and writes of the generation.

        A shard may be durable while it is written once more: a new keeper does not know that the
        old one had voted.
        """
        state = self.state
        for key in [key for key in state.votes if key[1] == generation]:
            del state.votes[key]
        for key in [key for key in state.persists if key[1] == generation]:
            self.abort_persist(key, "settled")
        for key, drop in list(state.drops.items()):
            if key[1] == generation and (memory or not drop.memory):
                del state.drops[key]

    def repeat(self) -> None:
        """Repeat seals, votes and drops that have no verdict."""
        state = self.state
        for rank, generation in state.unsettled:
            slot = state.ranks[rank].slots.sealed(generation)
            if slot is not None and slot.shard is not None:
                state.tell(m.RankSealed(shard=slot.shard))
        for vote in state.votes.values():
            state.tell(vote)
        for drop in state.drops.values():
            state.tell(drop)
