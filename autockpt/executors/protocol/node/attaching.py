"""Attach, takeover and loss of trainers at a node."""

from collections.abc import Iterator
from dataclasses import replace

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.node.replica_slots import ReplicaSlots
from autockpt.executors.protocol.node.restoring import Restoring
from autockpt.executors.protocol.node.saving import Saving
from autockpt.executors.protocol.node.slots import Slots
from autockpt.executors.protocol.node.state import LocalRank, NodeState
from autockpt.values.telemetry import LOST


class Attaching:
    """Admits trainers, replaces an incarnation, and notices losses."""

    def __init__(
        self, state: NodeState, replica_slots: ReplicaSlots, saving: Saving, restoring: Restoring
    ) -> None:
        self.state = state
        self.replica_slots = replica_slots
        self.saving = saving
        self.restoring = restoring

    def trainer_attached(self, event: m.TrainerAttached) -> None:
        """Admit the trainer, replacing an older incarnation if rule 9 says so."""
        state = self.state
        state.seen_term = max(state.seen_term, event.term or 0)
        state.newest_attempt = max(state.newest_attempt, event.attempt)
        refusal = self.attach_refusal(event)
        if refusal is not None:
            state.emit(
                m.AttachRefused(rank=event.rank, incarnation=event.incarnation, reason=refusal)
            )
            return
        if event.incarnation != state.incarnation:
            self._take_over(event)
        local = state.ranks.setdefault(event.rank, LocalRank(rank=event.rank))
        if local.attach is None or not local.alive:
            self._admit(local, event)
        local.refused = False
        state.tell(self._attached(local.attach or event))
        self.restoring.report_inventory()

    def _attached(self, attach: m.TrainerAttached) -> m.RankAttached:
        held = (
            shard.generation.term
            for slots in self._all_slots()
            for shard in slots.restorable_shards()
        )
        known = max((self.state.term, self.state.admission.term, self.state.seen_term, *held))
        return m.RankAttached(attach=attach, term=known)

    def _all_slots(self) -> Iterator[Slots]:
        yield from (local.slots for local in self.state.ranks.values())
        yield from self.state.replicas.values()

    def attach_refusal(self, event: m.TrainerAttached) -> str | None:
        """Rule 9, as far as this keeper can see; the refusal names the holder."""
        refusal = self.state.admission.refusal(event, [local.rank for local in self.state.living()])
        if refusal is None and event.incarnation == self.state.incarnation:
            return self._rejoin_refusal(event)
        return refusal

    def _rejoin_refusal(self, event: m.TrainerAttached) -> str | None:
        state = self.state
        if event.nodes != state.nodes:
            return f"{event.incarnation} is on nodes {list(state.nodes)}, not {list(event.nodes)}"
        home = event.nodes[event.rank]
        if home != state.node:
            return f"rank {event.rank} belongs to node {home}, not {state.node}"
        local = state.ranks.get(event.rank)
        if local is None or local.attach is None or local.alive:
            return None
        return f"rank {event.rank} of {event.incarnation} was lost; a new round is needed"

    def _take_over(self, event: m.TrainerAttached) -> None:
        state = self.state
        reason = f"replaced by {event.incarnation}"
        if state.phase == "open":
            state.open_term = state.term if state.all_attached() else 0
        elif state.phase not in ("waiting", "restoring"):
            state.open_term = 0
        for local in state.ranks.values():
            if local.alive and local.attach is not None:
                state.lingering.add((local.rank, local.attach.incarnation))
                fence = m.FenceTrainer(
                    rank=local.rank, incarnation=local.attach.incarnation, reason=reason
                )
                state.emit(fence)
        for key in list(state.persists):
            self.saving.abort_persist(key, reason)
        self.replica_slots.abort_fetches(reason)
        self._forget_incarnation()
        state.admission.admit(event)
        state.nodes, state.coordinator = event.nodes, min(event.nodes)
        state.node = event.nodes[event.rank]
        state.go("waiting")

    def _forget_incarnation(self) -> None:
        """Everything of it except the slots, which are what we are here for."""
        state = self.state
        for table in (
            state.unsettled,
            state.persists,
            state.attempts,
            state.votes,
            state.drops,
        ):
            table.clear()
        state.memory_committed = state.durable = state.inventory_due = None
        state.protected = state.copying = state.announced = state.placed = None
        state.replicated = state.holders = ()
        state.plan_version = state.plan_apply_step = 0
        for local in state.ranks.values():
            state.ranks[local.rank] = LocalRank(rank=local.rank, slots=local.slots)

    def _admit(self, local: LocalRank, event: m.TrainerAttached) -> None:
        self._learn_lineage(event)
        local.attach, local.alive = replace(event, lineage=()), True
        local.slots.resize(event.slots)
        if event.plan_version > self.state.plan_version:
            self.state.plan_version = event.plan_version
            self.state.plan_apply_step = event.plan_apply_step or 0

    def _learn_lineage(self, event: m.TrainerAttached) -> None:
        """A running trainer knows its lineage, which a new keeper and an emptied directory do not.

        The inventory names it to the coordinator.
        """
        if event.term is not None and _newest(event.lineage) > _newest(self.state.chain):
            self.state.chain = event.lineage

    def slots_adopted(self, event: m.SlotsAdopted) -> None:
        """A new keeper finds the memory of a rank; an old one knows better."""
        state = self.state
        if event.rank in state.ranks:
            state.stale(event)
            return
        local = state.ranks.setdefault(event.rank, LocalRank(rank=event.rank))
        local.slots.resize(event.slots)
        for shard in event.held:
            state.newest_attempt = max(state.newest_attempt, shard.generation.attempt)
            if 0 <= shard.slot < event.slots:
                local.slots.slots[shard.slot].adopt(shard)
        if state.phase == "open":
            self.saving.await_verdicts(local)

    def slots_replaced(self, event: m.SlotsReplaced) -> None:
        """The state outgrew its slots (or got its first ones): start with empty ones."""
        state = self.state
        local = state.ranks.get(event.rank)
        if local is None:
            state.stale(event)
            return
        for key in [key for key in state.persists if key[0] == event.rank]:
            if state.persists[key].record is None:
                self.saving.abort_persist(key, "the slots were replaced")
                self.saving.drop(*key, "the slots were replaced", memory=False)
        for slot in local.slots.slots:
            if slot.generation is not None:
                state.unsettled.pop((event.rank, slot.generation), None)
        local.slots = Slots()
        local.slots.resize(event.slots)

    def slots_added(self, event: m.SlotsAdded) -> None:
        """The host has room for more than the rank had."""
        local = self.state.ranks.get(event.rank)
        if local is None or event.slots < local.slots.usable:
            self.state.stale(event)
            return
        local.slots.resize(event.slots)

    def trainer_lost(self, event: m.TrainerLost) -> None:
        """The process is dead: nothing writes its slots, and its snapshot will not finish."""
        state = self.state
        state.lingering.discard((event.rank, event.incarnation))
        local = state.ranks.get(event.rank)
        if local is None:
            return
        current, reason = event.incarnation == state.incarnation, f"rank {event.rank} {LOST}"
        for slot in local.slots.slots:
            if slot.state == "writing" and slot.writer == event.incarnation:
                generation, known = slot.generation, slot.doomed
                assert generation is not None
                self.saving.abort_persist((event.rank, generation), reason)
                slot.clear()
                if not known and state.is_current(generation):
                    self.saving.drop(event.rank, generation, reason, memory=True)
        if current and local.alive:
            local.alive, local.plan_held, local.plan_offered = False, None, 0
            state.tell(event)

    def refused(self, message: m.AttachRefused | m.RestoreRefused) -> None:
        """The coordinator does not let this rank start."""
        state = self.state
        local = state.ranks.get(message.rank)
        if message.incarnation != state.incarnation or local is None or local.attach is None:
            state.stale(message)
            return
        if local.refused or local.started or not local.alive:
            return
        local.refused = True
        state.emit(message)

    def fenced(self, message: m.TermFenced) -> None:
        """A newer term owns the directory: stop saving, tell the trainers."""
        state = self.state
        older = message.incarnation != state.incarnation or message.term < state.term
        if older or state.phase in ("idle", "fenced"):
            state.stale(message)
            return
        for key in list(state.persists):
            self.saving.abort_persist(key, message.reason)
        self.replica_slots.abort_fetches(message.reason)
        for table in (state.unsettled, state.votes, state.drops):
            table.clear()
        for local in state.living():
            if local.attach is not None:
                incarnation = local.attach.incarnation
                state.emit(
                    m.FenceTrainer(rank=local.rank, incarnation=incarnation, reason=message.reason)
                )
        state.go("fenced")

    def node_lost(self, event: m.NodeLost) -> None:
        """Nothing to decide here: saves stay open until the coordinator or a new one speaks."""
        if self.state.nodes and event.node == min(self.state.nodes):
            detail = f"coordinator node {event.node} cannot be reached; no save can commit"
            self.state.emit(m.Report(kind="warning", detail=detail))

    def repeat(self) -> None:
        """Repeat attaches, losses and promises that have no answer."""
        for local in self.state.ranks.values():
            self._repeat_rank(local)

    def _repeat_rank(self, local: LocalRank) -> None:
        if local.attach is None:
            return
        if not local.alive:
            self.state.tell(m.TrainerLost(incarnation=local.attach.incarnation, rank=local.rank))
        elif not local.started and not local.refused:
            self.state.tell(self._attached(local.attach))
        elif local.plan_held is not None:
            self.state.relay(local.plan_held)


def _newest(lineage: tuple[m.TermParent, ...]) -> tuple[int, int]:
    """Term and attempt in which the trainers of a lineage run."""
    return (lineage[0].term, lineage[0].attempt) if lineage else (0, 0)
