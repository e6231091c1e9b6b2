"""Restore at a node: it reports its memory, brings shards here, and lets its trainers read.

Trainers of a node read when all shards that the node fetches or rebuilds are complete.
"""

from collections.abc import Iterator

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.node.plan_change import PlanChange
from autockpt.executors.protocol.node.replica_slots import ReplicaSlots
from autockpt.executors.protocol.node.saving import Saving
from autockpt.executors.protocol.node.slots import Slots
from autockpt.executors.protocol.node.state import LocalRank, NodeState, replica_of
from autockpt.values.generation import Generation


class Restoring:
    """From the inventory to the moment the trainers of this node go on."""

    def __init__(
        self, state: NodeState, replica_slots: ReplicaSlots, saving: Saving, plan_change: PlanChange
    ) -> None:
        self.state = state
        self.replica_slots = replica_slots
        self.saving = saving
        self.plan_change = plan_change

    # ------------------------------------------------------------------ inventory

    def inventory_wanted(self, message: m.InventoryWanted) -> None:
        """From now on older terms are fenced here; answer once every local rank has attached."""
        state = self.state
        if message.incarnation != state.incarnation or not self._may_restore(message):
            state.stale(message)
            return
        state.admission.hold(message.term)
        if not message.rejoin:
            state.term = message.term
            if state.phase == "waiting":
                state.go("restoring")
        state.inventory_due = (message.term, message.rejoin)
        self.report_inventory()

    def _may_restore(self, message: m.InventoryWanted) -> bool:
        state = self.state
        if state.phase == "open":
            return message.rejoin and message.term == state.term
        return state.phase in ("waiting", "restoring") and message.term >= state.term

    def report_inventory(self) -> None:
        """Rule 11: an answer without a rank that is still to attach would lose what it knows."""
        state = self.state
        if state.inventory_due is None or state.incarnation is None:
            return
        if not state.all_attached():
            return
        term, _ = state.inventory_due
        state.inventory_due = None
        report = m.InventoryReported(
            incarnation=state.incarnation,
            term=term,
            held=tuple(
                shard for slots in self._shard_slots() for shard in slots.restorable_shards()
            ),
            parities=tuple(
                parity
                for (_, of_parity), slots in state.replicas.items()
                if of_parity
                for parity in slots.restorable_shards()
            ),
            protected=state.protected,
            copied=self.replica_slots.copied(),
            plan_version=state.plan_version,
            plan_apply_step=state.plan_apply_step,
            lineage=state.chain,
            unbroken=state.open_term == term and not state.lingering,
            attempt=state.newest_attempt,
        )
        state.tell(report)

    def _shard_slots(self) -> Iterator[Slots]:
        yield from (local.slots for local in self.state.ranks.values())
        yield from (slots for (_, of_parity), slots in self.state.replicas.items() if not of_parity)

    # ------------------------------------------------------------------ orders

    def restore_ordered(self, message: m.RestoreOrdered) -> None:
        """Start it, or repeat the answer; a newer attempt replaces an older one."""
        state = self.state
        local = state.ranks.get(message.rank)
        fits = message.incarnation == state.incarnation and message.term == state.term
        if local is None or local.attach is None or not fits or state.phase != "restoring":
            state.stale(message)
        elif not local.alive:
            state.tell(m.TrainerLost(incarnation=message.incarnation, rank=message.rank))
        elif local.order is None or self._later(message, local.order):
            local.order, local.answer, local.told = message, None, False
            if message.source.brought:
                self.bring(message)
            elif message.source.kind == "gather":
                self.gather(message)
            self.release_orders()
        elif local.answer is not None and message.attempt == local.order.attempt:
            state.tell(local.answer)

    @staticmethod
    def _later(message: m.RestoreOrdered, order: m.RestoreOrdered) -> bool:
        return (message.term, message.attempt) > (order.term, order.attempt)

    def shard_verified(self, event: m.ShardVerified) -> None:
        """The trainer holds its shard and every chunk matched; an earlier verdict is void."""
        local = self._restoring(event)
        if local is not None and local.order is not None:
            self._judge(local, local.order, worthless=False)
            local.answer = event
            self.state.tell(event)

    def shard_bad(self, event: m.ShardBad) -> None:
        """The source does not match; a slot that lied is never offered again."""
        local = self._restoring(event)
        if local is None or local.order is None:
            return
        self._judge(local, local.order, worthless=True)
        local.answer = event
        self.state.tell(event)

    def _judge(self, local: LocalRank, order: m.RestoreOrdered, *, worthless: bool) -> None:
        source = order.source
        if source.kind == "memory":
            slots = (
                self.replica_slots.replicas_of((local.rank, False))
                if source.copied
                else local.slots
            )
            for slot in slots.slots:
                if slot.index == source.slot:
                    slot.worthless = worthless
        elif source.brought:
            brought = self.replica_slots.replicas_of((local.rank, False)).sealed(order.generation)
            if brought is not None:
                brought.worthless = worthless

    def _restoring(self, event: m.ShardVerified | m.ShardBad) -> LocalRank | None:
        state = self.state
        local = state.ranks.get(event.rank)
        order = local.order if local else None
        if local is None or order is None or state.phase != "restoring" or local.answer is not None:
            state.stale(event)
            return None
        if (event.term, event.attempt) != (order.term, order.attempt):
            state.stale(event)
            return None
        return local

    # ------------------------------------------------------------------ shards from other nodes

    def bring(self, order: m.RestoreOrdered) -> None:
        """Fetch or rebuild the shard first."""
        shard = order.source.shard
        named = shard is not None and shard.rank == order.rank
        if not named or not self._bring(order.source, order.generation):
            self._no_copy(order, "no replica slot is free" if named else "no shard is named")

    def _bring(self, source: m.ShardSource, generation: Generation) -> bool:
        """It is or will be here, maybe since an earlier attempt; False: there is no slot for it."""
        shard = source.shard
        if shard is None or shard.generation != generation:
            return False
        replica = replica_of(shard)
        fetch = self.state.fetches.get(replica)
        under_way = fetch is not None and fetch.sources == source.brought
        if self.replica_slots.copy_of(shard.rank, generation) is not None or under_way:
            return True
        self.replica_slots.abort_fetch(replica, "another source was chosen")
        slot = self.replica_slots.choose_replica_slot(replica)
        if slot is not None:
            self.replica_slots.begin_fetch(shard, source.brought, slot)
        return slot is not None

    def shards_placed(self, message: m.ShardsPlaced) -> None:
        """Lend the shards that ranks of this node will gather, and rebuild our part first."""
        state = self.state
        fits = (message.incarnation, message.term) == (state.incarnation, state.term)
        known = state.placed is not None and message.attempt <= state.placed.attempt
        if not fits or state.phase != "restoring" or known:
            state.stale(message)
            return
        state.placed = message
        lent = m.ServeShards(
            term=message.term, attempt=message.attempt, generation=message.generation,
            places=message.places, rebuilt=message.rebuilt,
        )  # fmt: skip
        state.emit(lent)
        for source in message.rebuilds_at(state.node):
            self._bring(source, message.generation)

    def shard_fetched(self, event: m.ShardFetched) -> None:
        """The shard is complete: it counts as a copy, or a rank can be restored from it."""
        state = self.state
        shard = event.shard
        replica = replica_of(shard)
        fetch = state.fetches.get(replica)
        if fetch is None or (fetch.slot, fetch.generation) != (shard.slot, shard.generation):
            state.stale(event)
            return
        del state.fetches[replica]
        self.replica_slots.seal(shard)
        if self.replica_slots.is_wanted(replica):
            state.tell(m.CopySealed(shard=shard))
        self.release_orders()

    def fetch_failed(self, event: m.FetchFailed) -> None:
        """Tried again when the coordinator asks again; a restore looks for another source."""
        state = self.state
        replica = (event.rank, event.parity)
        fetch = state.fetches.get(replica)
        if fetch is None or (fetch.slot, fetch.generation) != (event.slot, event.generation):
            state.stale(event)
            return
        del state.fetches[replica]
        state.replicas[replica].slots[event.slot].clear()
        waiting = [] if event.parity else self._waiting(event.rank, event.generation)
        for order in waiting:
            self._no_copy(order, event.reason)
        if event.final and not waiting:
            state.tell(
                m.CopyFailed(owner=event.rank, generation=event.generation, reason=event.reason)
            )

    def gather(self, order: m.RestoreOrdered) -> None:
        """Nothing to begin: `shards_placed` did; say so if that came to nothing."""
        ranks = self._rebuilt_for(order) or ()
        for rank in ranks:
            if (
                self.replica_slots.copy_of(rank, order.generation) is None
                and (rank, False) not in self.state.fetches
            ):
                self._no_copy(order, f"the shard of rank {rank} could not be rebuilt here")
                return

    def release_orders(self) -> None:
        """Let trainers read, once all that their node fetches is here."""
        if self.state.phase != "restoring":
            return
        for local in self.state.ranks.values():
            order = local.order
            if order is None or local.told or local.answer is not None:
                continue
            if self._is_ready(order):
                local.told = True
                self.state.emit(self._read(order))

    def _is_ready(self, order: m.RestoreOrdered) -> bool:
        if order.source.kind == "gather":
            return self._is_placed(order)
        return all(
            self.replica_slots.copy_of(rank, order.generation) is not None
            for rank in order.fetching
        )

    def _is_placed(self, order: m.RestoreOrdered) -> bool:
        """Where to gather from is known, and what this node rebuilds for it is there."""
        ranks = self._rebuilt_for(order)
        if ranks is None:
            return False
        return all(self.replica_slots.copy_of(rank, order.generation) is not None for rank in ranks)

    def _rebuilt_for(self, order: m.RestoreOrdered) -> list[int] | None:
        """Ranks whose shards this node rebuilds for all that gather; None: not known yet."""
        placed = self.state.placed
        if placed is None or (placed.term, placed.attempt) != (order.term, order.attempt):
            return None
        mine = placed.rebuilds_at(self.state.node)
        return [source.shard.rank for source in mine if source.shard is not None]

    def _read(self, order: m.RestoreOrdered) -> m.RestoreShard:
        """Return the trainer's instruction: a fetched shard is memory of this node."""
        source = order.source
        copy = self.replica_slots.copy_of(order.rank, order.generation) if source.brought else None
        if copy is not None:
            source = m.ShardSource(
                kind="memory", slot=copy.slot, copied=True, rebuilt=source.kind == "parity",
                root=copy.root,
            )  # fmt: skip
        return m.RestoreShard(
            rank=order.rank,
            term=order.term,
            attempt=order.attempt,
            generation=order.generation,
            step=order.step,
            source=source,
            readers=order.readers,
        )

    def _waiting(self, rank: int, generation: Generation) -> list[m.RestoreOrdered]:
        """Orders that this fetch is for: of the rank itself, or of all that gather its shard."""
        if self.state.phase != "restoring":
            return []
        unanswered = [local.order for local in self.state.ranks.values() if local.answer is None]
        return [
            order
            for order in unanswered
            if order is not None
            and order.generation == generation
            and (order.source.kind == "gather" or (order.source.brought and order.rank == rank))
        ]

    def _no_copy(self, order: m.RestoreOrdered, reason: str) -> None:
        local = self.state.ranks[order.rank]
        local.answer = m.ShardBad(
            rank=order.rank, term=order.term, attempt=order.attempt, detail=reason
        )
        self.state.tell(local.answer)

    # ------------------------------------------------------------------ the term opens

    def term_opened(self, message: m.TermOpened) -> None:
        """All ranks hold the parent: trainers that wait start, running ones go on."""
        state = self.state
        fits = message.incarnation == state.incarnation and message.term >= state.term
        if not fits or state.phase in ("idle", "fenced"):
            state.stale(message)
            return
        if state.phase != "open":
            self._open(message)
        for local in state.living():
            if not local.started:
                local.started = True
                self._start(local, message)

    def _open(self, message: m.TermOpened) -> None:
        state = self.state
        state.go("open")
        state.admission.hold(message.term)  # a new keeper has not seen the claim
        state.term, state.chain = message.term, message.lineage
        state.memory_committed = message.memory_committed
        state.durable = message.durable or (message.parent if message.parent_durable else None)
        state.replicated, state.holders = message.replicated, message.holders
        state.protected = message.protected
        if message.plan_version > state.plan_version:
            state.plan_version, state.plan_apply_step = (
                message.plan_version,
                message.plan_apply_step,
            )
        for local in state.ranks.values():
            self.saving.await_verdicts(local)

    def _start(self, local: LocalRank, message: m.TermOpened) -> None:
        attach = local.attach
        if attach is not None and attach.term == message.term:
            self._continue(local, attach)
        elif message.parent is None:
            scratch = m.StartFresh(
                rank=local.rank, term=message.term, reason=message.scratch, lineage=message.lineage
            )
            self.state.emit(scratch)
        else:
            self.state.emit(
                m.Resume(
                    rank=local.rank,
                    term=message.term,
                    generation=message.parent,
                    step=message.step,
                    durable=message.ever_durable,
                    attempt=self.state.first_attempt,
                    lineage=message.lineage,
                )
            )

    def _continue(self, local: LocalRank, attach: m.TrainerAttached) -> None:
        """A running trainer came back: only a plan it holds may need a verdict."""
        held = [shard.generation for shard in local.slots.restorable_shards()]
        local.newest = max((g for g in held if g.term == self.state.term), default=None)
        self.plan_change.resume_held(local, attach)
