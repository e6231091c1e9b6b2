"""NodeProtocol: what one keeper decides by itself, for the ranks on its node.

Trainers talk only to their keeper.  The keeper admits them, grants slots, counts seals and files,
and repeats to the coordinator whatever that has not answered.  It never decides alone that
something is committed, restored or planned: those are the coordinator's verdicts.

Pure: `handle(event)` returns the instructions to carry out, in order.  Theory and the rules by
number: docs/protocol.md.
"""

from collections.abc import Callable, Iterator
from typing import Any

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.protocol.node.saving import NodeSaving
from autockpt.executors.protocol.node.slots import Slots
from autockpt.executors.protocol.node.state import LocalRank
from autockpt.values.telemetry import LOST


class NodeProtocol(NodeSaving):
    """One per keeper.  `handle` never raises on reordered, doubled or late events."""

    def __init__(self, *, node: int = 0, deadlines: Deadlines | None = None) -> None:
        """`node`: index of this node, until an incarnation says otherwise."""
        super().__init__(node=node, deadlines=deadlines)
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.TrainerAttached: self.trainer_attached,
            m.TrainerLost: self.trainer_lost,
            m.SlotsAdopted: self.slots_adopted,
            m.SlotsOutgrown: self.outgrown,
            m.SlotsReplaced: self.slots_replaced,
            m.SaveRequested: self.save_requested,
            m.ShardSealed: self.shard_sealed,
            m.ShardDiscarded: self.shard_discarded,
            m.ShardPersisted: self.shard_persisted,
            m.PersistFailed: self.persist_failed,
            m.PersistStalled: self.persist_stalled,
            m.ShardFetched: self.shard_fetched,
            m.ShardComing: self.shard_coming,
            m.FetchFailed: self.fetch_failed,
            m.ShardVerified: self.shard_verified,
            m.ShardBad: self.shard_bad,
            m.BreakpointRequested: self.breakpoint_requested,
            m.PlanPrepared: self.plan_prepared,
            m.PlanLate: self.plan_late,
            m.PlanProposed: self.plan_proposed,
            m.NodeLost: self.node_lost,
            m.TimePassed: self.time_passed,
            m.AttachDenied: self.denied,
            m.InventoryWanted: self.inventory_wanted,
            m.RestoreOrdered: self.restore_ordered,
            m.ShardsPlaced: self.shards_placed,
            m.TermOpened: self.term_opened,
            m.MemoryCommitted: self.memory_committed_heard,
            m.CopiesWanted: self.copies_wanted,
            m.CopiesEnded: self.copies_ended,
            m.DurableCommitted: self.durable_heard,
            m.GenerationDropped: self.dropped_heard,
            m.PersistWanted: self.persist_wanted,
            m.TermFenced: self.fenced,
            m.PlanOffered: self.plan_offered,
            m.PlanDecided: self.plan_decided,
            m.PlanDropped: self.plan_dropped,
        }

    def handle(self, event: m.NodeEvent) -> list[m.NodeInstruction]:
        """What to do now that `event` happened."""
        self._out = []
        inner = event.message if isinstance(event, m.MessageReceived) else event
        handler = self._handlers.get(type(inner))
        if handler is None:
            self.stale(inner)
        else:
            handler(inner)
        return self._out

    # ------------------------------------------------------------------ attach

    def trainer_attached(self, event: m.TrainerAttached) -> None:
        """Admit the trainer, replacing an older incarnation if rule 9 says so."""
        self.seen_term = max(self.seen_term, event.term or 0)
        refusal = self.attach_refusal(event)
        if refusal is not None:
            self.emit(
                m.AttachRefused(rank=event.rank, incarnation=event.incarnation, reason=refusal)
            )
            return
        if event.incarnation != self.incarnation:
            self._take_over(event)
        local = self.ranks.setdefault(event.rank, LocalRank(rank=event.rank))
        if local.attach is None or not local.alive:
            self._admit(local, event)
        local.refused = False
        self.tell(self._attached(local.attach or event))
        self._report_inventory()

    def _attached(self, attach: m.TrainerAttached) -> m.RankAttached:
        held = (shard.generation.term for slots in self._all_slots() for shard in slots.held())
        known = max((self.term, self.admission.term, self.seen_term, *held))
        return m.RankAttached(attach=attach, term=known)

    def attach_refusal(self, event: m.TrainerAttached) -> str | None:
        """Rule 9, as far as this keeper can see; the refusal names the holder."""
        refusal = self.admission.refusal(event, [local.rank for local in self.living()])
        if refusal is None and event.incarnation == self.incarnation:
            return self._rejoin_refusal(event)
        return refusal

    def _rejoin_refusal(self, event: m.TrainerAttached) -> str | None:
        if event.nodes != self.nodes:
            return f"{event.incarnation} is on nodes {list(self.nodes)}, not {list(event.nodes)}"
        if event.nodes[event.rank] != self.node:
            return f"rank {event.rank} belongs to node {event.nodes[event.rank]}, not {self.node}"
        local = self.ranks.get(event.rank)
        if local is None or local.attach is None or local.alive:
            return None
        return f"rank {event.rank} of {event.incarnation} was lost; a new round is needed"

    def _take_over(self, event: m.TrainerAttached) -> None:
        reason = f"replaced by {event.incarnation}"
        for local in self.ranks.values():
            if local.alive and local.attach is not None:
                fence = m.FenceTrainer(
                    rank=local.rank, incarnation=local.attach.incarnation, reason=reason
                )
                self.emit(fence)
        for key in list(self.persists):
            self._abort_persist(key, reason)
        self.abort_fetches(reason)
        self._forget_incarnation()
        self.admission.admit(event)
        self.nodes, self.coordinator = event.nodes, min(event.nodes)
        self.node = event.nodes[event.rank]
        self.go("waiting")

    def _forget_incarnation(self) -> None:
        """Everything of it except the slots, which are what we are here for."""
        for table in (self.unsettled, self.persists, self.attempts, self.votes, self.drops):
            table.clear()
        self.memory_committed = self.durable = self.inventory_due = None
        self.protected = self.copying = self.announced = self.placed = None
        self.wards = self.holders = ()
        self.plan_version = self.plan_apply_step = 0
        for local in self.ranks.values():
            self.ranks[local.rank] = LocalRank(rank=local.rank, slots=local.slots)

    def _admit(self, local: LocalRank, event: m.TrainerAttached) -> None:
        local.attach, local.alive = event, True
        local.slots.resize(event.slots)
        if event.plan_version > self.plan_version:
            self.plan_version = event.plan_version
            self.plan_apply_step = event.plan_apply_step or 0

    def slots_adopted(self, event: m.SlotsAdopted) -> None:
        """A new keeper finds the memory of a rank; an old one knows better."""
        if event.rank in self.ranks:
            self.stale(event)
            return
        local = self.ranks.setdefault(event.rank, LocalRank(rank=event.rank))
        local.slots.resize(event.slots)
        for shard in event.held:
            if 0 <= shard.slot < event.slots:
                local.slots.slots[shard.slot].adopt(shard)
        if self.phase == "open":
            self._ask_for_verdicts(local)

    def slots_replaced(self, event: m.SlotsReplaced) -> None:
        """The state outgrew its slots (or got its first ones): start with empty ones."""
        local = self.ranks.get(event.rank)
        if local is None:
            self.stale(event)
            return
        for key in [key for key in self.persists if key[0] == event.rank]:
            if self.persists[key].record is None:
                self._abort_persist(key, "the slots were replaced")
                self._drop(*key, "the slots were replaced", memory=False)
        for slot in local.slots.slots:
            if slot.generation is not None:
                self.unsettled.pop((event.rank, slot.generation), None)
        local.slots = Slots()
        local.slots.resize(event.slots)

    def trainer_lost(self, event: m.TrainerLost) -> None:
        """The process is dead: nothing writes its slots, and its snapshot will not finish."""
        local = self.ranks.get(event.rank)
        if local is None:
            return
        current, reason = event.incarnation == self.incarnation, f"rank {event.rank} {LOST}"
        for slot in local.slots.slots:
            if slot.state == "writing" and slot.writer == event.incarnation:
                generation, known = slot.generation, slot.doomed
                assert generation is not None
                self._abort_persist((event.rank, generation), reason)
                slot.clear()
                if not known and self.is_current(generation):
                    self._drop(event.rank, generation, reason, memory=True)
        if current and local.alive:
            local.alive, local.plan_held, local.plan_offered = False, None, 0
            self.tell(m.RankLost(incarnation=event.incarnation, rank=event.rank))

    def denied(self, message: m.AttachDenied) -> None:
        """The coordinator does not let this rank start."""
        local = self.ranks.get(message.rank)
        if message.incarnation != self.incarnation or local is None or local.attach is None:
            self.stale(message)
            return
        if local.refused or local.started or not local.alive:
            return
        local.refused = True
        rank, incarnation, reason = message.rank, message.incarnation, message.refusal
        if message.restoring:
            retryable = message.retryable
            self.emit(
                m.RestoreRefused(
                    rank=rank, incarnation=incarnation, reason=reason, retryable=retryable
                )
            )
        else:
            self.emit(m.AttachRefused(rank=rank, incarnation=incarnation, reason=reason))

    # ------------------------------------------------------------------ restore

    def inventory_wanted(self, message: m.InventoryWanted) -> None:
        """From now on older terms are fenced here; answer once every local rank has attached."""
        if message.incarnation != self.incarnation or not self._may_restore(message):
            self.stale(message)
            return
        self.admission.hold(message.term)
        if not message.rejoin:
            self.term = message.term
            if self.phase == "waiting":
                self.go("restoring")
        self.inventory_due = (message.term, message.rejoin)
        self._report_inventory()

    def _may_restore(self, message: m.InventoryWanted) -> bool:
        if self.phase == "open":
            return message.rejoin and message.term == self.term
        return self.phase in ("waiting", "restoring") and message.term >= self.term

    def _report_inventory(self) -> None:
        """Rule 11: an answer without a rank that is still to attach would lose what it knows."""
        if self.inventory_due is None or self.incarnation is None:
            return
        here = [rank for rank, node in enumerate(self.nodes) if node == self.node]
        if any(rank not in self.ranks or self.ranks[rank].attach is None for rank in here):
            return
        term, _ = self.inventory_due
        self.inventory_due = None
        report = m.InventoryReported(
            incarnation=self.incarnation,
            term=term,
            held=tuple(shard for slots in self._shard_slots() for shard in slots.held()),
            parities=tuple(
                parity
                for (_, of_parity), slots in self.guests.items()
                if of_parity
                for parity in slots.held()
            ),
            protected=self.protected,
            plan_version=self.plan_version,
            plan_apply_step=self.plan_apply_step,
            lineage=self.chain,
        )
        self.tell(report)

    def _all_slots(self) -> Iterator[Slots]:
        yield from (local.slots for local in self.ranks.values())
        yield from self.guests.values()

    def _shard_slots(self) -> Iterator[Slots]:
        yield from (local.slots for local in self.ranks.values())
        yield from (slots for (_, of_parity), slots in self.guests.items() if not of_parity)

    def restore_ordered(self, message: m.RestoreOrdered) -> None:
        """Start it, or repeat the answer; a newer attempt replaces an older one."""
        local = self.ranks.get(message.rank)
        fits = message.incarnation == self.incarnation and message.term == self.term
        if local is None or local.attach is None or not fits or self.phase != "restoring":
            self.stale(message)
        elif not local.alive:
            self.tell(m.RankLost(incarnation=message.incarnation, rank=message.rank))
        elif local.order is None or self._later(message, local.order):
            local.order, local.answer, local.told = message, None, False
            if message.source.brought:
                self.bring(message)
            elif message.source.kind == "gather":
                self.gather(message)
            self.release_orders()
        elif local.answer is not None and message.attempt == local.order.attempt:
            self.tell(local.answer)

    @staticmethod
    def _later(message: m.RestoreOrdered, order: m.RestoreOrdered) -> bool:
        return (message.term, message.attempt) > (order.term, order.attempt)

    def shard_verified(self, event: m.ShardVerified) -> None:
        """The trainer holds its shard, every chunk matched, whatever an earlier attempt said."""
        local = self._restoring(event)
        if local is not None and local.order is not None:
            self._judge(local, local.order, worthless=False)
            local.answer = m.RankVerified(rank=event.rank, term=event.term, attempt=event.attempt)
            self.tell(local.answer)

    def shard_bad(self, event: m.ShardBad) -> None:
        """The source does not match; a slot that lied is never offered again."""
        local = self._restoring(event)
        if local is None or local.order is None:
            return
        self._judge(local, local.order, worthless=True)
        local.answer = m.RankBad(
            rank=event.rank, term=event.term, attempt=event.attempt, detail=event.detail
        )
        self.tell(local.answer)

    def _judge(self, local: LocalRank, order: m.RestoreOrdered, *, worthless: bool) -> None:
        source = order.source
        if source.kind == "memory":
            slots = self.guests_of((local.rank, False)) if source.copied else local.slots
            for slot in slots.slots:
                if slot.index == source.slot:
                    slot.worthless = worthless
        elif source.brought:
            brought = self.guests_of((local.rank, False)).sealed(order.generation)
            if brought is not None:
                brought.worthless = worthless

    def _restoring(self, event: m.ShardVerified | m.ShardBad) -> LocalRank | None:
        local = self.ranks.get(event.rank)
        order = local.order if local else None
        if local is None or order is None or self.phase != "restoring" or local.answer is not None:
            self.stale(event)
            return None
        if (event.term, event.attempt) != (order.term, order.attempt):
            self.stale(event)
            return None
        return local

    def term_opened(self, message: m.TermOpened) -> None:
        """All ranks hold the parent: trainers that wait start, running ones go on."""
        fits = message.incarnation == self.incarnation and message.term >= self.term
        if not fits or self.phase in ("idle", "fenced"):
            self.stale(message)
            return
        if self.phase != "open":
            self._open(message)
        for local in self.living():
            if not local.started:
                local.started = True
                self._start(local, message)

    def _open(self, message: m.TermOpened) -> None:
        self.go("open")
        self.admission.hold(message.term)  # a new keeper has not seen the claim
        self.term, self.chain = message.term, message.lineage
        self.memory_committed = message.memory_committed
        self.durable = message.durable or (message.parent if message.parent_durable else None)
        self.wards, self.holders = message.wards, message.holders
        self.protected = message.protected
        if message.plan_version > self.plan_version:
            self.plan_version, self.plan_apply_step = message.plan_version, message.plan_apply_step
        for local in self.ranks.values():
            self._ask_for_verdicts(local)

    def _ask_for_verdicts(self, local: LocalRank) -> None:
        """What an earlier keeper left may still become a memory commit: others are at it."""
        for shard in local.slots.held():
            newer = self.memory_committed is None or shard.generation > self.memory_committed
            if self.is_current(shard.generation) and newer:
                self.unsettled[shard.rank, shard.generation] = None

    def _start(self, local: LocalRank, message: m.TermOpened) -> None:
        attach = local.attach
        if attach is not None and attach.term == message.term:
            self._continue(local, attach)
        elif message.parent is None:
            scratch = m.StartFresh(rank=local.rank, term=message.term, reason=message.scratch)
            self.emit(scratch)
        else:
            self.emit(
                m.Resume(
                    rank=local.rank,
                    term=message.term,
                    generation=message.parent,
                    step=message.step,
                    durable=message.ever_durable,
                )
            )

    def _continue(self, local: LocalRank, attach: m.TrainerAttached) -> None:
        """A running trainer came back: only a plan it holds may need a verdict."""
        held = [shard.generation for shard in local.slots.held()]
        local.newest = max((g for g in held if g.term == self.term), default=None)
        if attach.plan_held and attach.plan_held == self.plan_version:
            self._apply_plan(local)
        elif attach.plan_held:
            reason = "the keeper restarted"
            self.emit(m.AbortPlan(rank=local.rank, version=attach.plan_held, reason=reason))

    def fenced(self, message: m.TermFenced) -> None:
        """A newer term owns the directory: stop saving, tell the trainers."""
        older = message.incarnation != self.incarnation or message.term < self.term
        if older or self.phase in ("idle", "fenced"):
            self.stale(message)
            return
        for key in list(self.persists):
            self._abort_persist(key, message.reason)
        self.abort_fetches(message.reason)
        for table in (self.unsettled, self.votes, self.drops):
            table.clear()
        for local in self.living():
            if local.attach is not None:
                incarnation = local.attach.incarnation
                self.emit(
                    m.FenceTrainer(rank=local.rank, incarnation=incarnation, reason=message.reason)
                )
        self.go("fenced")

    # ------------------------------------------------------------------ plan change, breakpoint

    def plan_proposed(self, event: m.PlanProposed) -> None:
        """Hand the proposal to the coordinator."""
        if self.incarnation is not None and self.phase == "open":
            self.tell(
                m.PlanWanted(
                    incarnation=self.incarnation, version=event.version, payload=event.payload
                )
            )

    def plan_offered(self, message: m.PlanOffered) -> None:
        """Ask every local trainer; one that still holds an older plan asks about that first."""
        if message.term != self.term or self.phase != "open":
            self.stale(message)
            return
        for local in self.ranks.values():
            if local.attach is None:
                continue
            if not local.alive:
                self.tell(m.RankLost(incarnation=local.attach.incarnation, rank=local.rank))
            elif local.plan_held is not None:
                self.tell(local.plan_held)
            elif message.version > max(self.plan_version, local.plan_offered):
                self._offer_plan(local, message)

    def _offer_plan(self, local: LocalRank, message: m.PlanOffered) -> None:
        local.plan_offered = message.version
        self.emit(
            m.PreparePlan(
                rank=local.rank,
                version=message.version,
                payload=message.payload,
                margin_steps=message.margin_steps,
            )
        )

    def plan_prepared(self, event: m.PlanPrepared) -> None:
        """The trainer holds; pass its step on, and repeat until there is a verdict."""
        local = self.ranks.get(event.rank)
        if local is None or not local.alive or event.version != local.plan_offered:
            self.stale(event)
            return
        if event.version <= self.plan_version or local.plan_held is not None:
            self.stale(event)
            return
        local.plan_held = m.RankPlanPrepared(
            term=self.term, rank=event.rank, version=event.version, step=event.step
        )
        self.tell(local.plan_held)

    def plan_late(self, event: m.PlanLate) -> None:
        """The trainer broke its promise to hold; the coordinator says what now."""
        self.tell(
            m.RankPlanLate(term=self.term, rank=event.rank, version=event.version, step=event.step)
        )

    def plan_decided(self, message: m.PlanDecided) -> None:
        """Every rank prepared it: pass the step on."""
        older = message.version < self.plan_version
        known = (self.plan_version, self.plan_apply_step)
        if message.term != self.term or self.phase != "open" or older:
            self.stale(message)
            return
        if (message.version, message.apply_step) == known:
            return
        self.plan_version, self.plan_apply_step = message.version, message.apply_step
        for local in self.living():
            self._apply_plan(local)

    def _apply_plan(self, local: LocalRank) -> None:
        local.plan_held = None
        self.emit(
            m.ApplyPlan(rank=local.rank, version=self.plan_version, apply_step=self.plan_apply_step)
        )

    def plan_dropped(self, message: m.PlanDropped) -> None:
        """It never applies: let the trainers go on."""
        if message.term != self.term or message.version == self.plan_version:
            self.stale(message)
            return
        for local in self.living():
            offered = local.plan_offered == message.version
            if offered:
                local.plan_held, local.plan_offered = None, 0
            if offered or message.version >= m.STOP_VERSION:  # who asks for a stop waits for this
                abort = m.AbortPlan(rank=local.rank, version=message.version, reason=message.reason)
                self.emit(abort)

    def breakpoint_requested(self, event: m.BreakpointRequested) -> None:
        """The end is near: ask for the newest memory commit to be made durable."""
        if self.incarnation is not None and self.phase == "open":
            self.tell(m.BreakpointWanted(incarnation=self.incarnation, reason=event.reason))

    # ------------------------------------------------------------------ time and neighbours

    def node_lost(self, event: m.NodeLost) -> None:
        """Nothing to decide here: saves stay open until the coordinator or a new one speaks."""
        if self.nodes and event.node == min(self.nodes):
            detail = f"coordinator node {event.node} cannot be reached; no save can commit"
            self.emit(m.Report(kind="warning", detail=detail))

    def time_passed(self, event: m.TimePassed) -> None:
        """Repeat what has not been answered."""
        self.now_s = max(self.now_s, event.now_s)
        if self.now_s - self.resent_s < self.deadlines.resend_s:
            return
        self.resent_s = self.now_s
        for local in self.ranks.values():
            self._repeat_rank(local)
        for rank, generation in self.unsettled:
            slot = self.ranks[rank].slots.sealed(generation)
            if slot is not None and slot.shard is not None:
                self.tell(m.RankSealed(shard=slot.shard))
        for vote in self.votes.values():
            self.tell(vote)
        for drop in self.drops.values():
            self.tell(drop)

    def _repeat_rank(self, local: LocalRank) -> None:
        if local.attach is None:
            return
        if not local.alive:
            self.tell(m.RankLost(incarnation=local.attach.incarnation, rank=local.rank))
        elif not local.started and not local.refused:
            self.tell(self._attached(local.attach))
        elif local.plan_held is not None:
            self.tell(local.plan_held)
