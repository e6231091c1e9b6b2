"""Attach and loss of ranks and nodes, as the coordinator sees them."""

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.plan_change import PlanChange
from autockpt.executors.protocol.coordinator.replicating import Replicating
from autockpt.executors.protocol.coordinator.restoring import Restoring
from autockpt.executors.protocol.coordinator.saving import Saving
from autockpt.executors.protocol.coordinator.state import CoordinatorState
from autockpt.values.telemetry import LOST


class Attaching:
    """Admits ranks, begins an incarnation, and notices losses."""

    def __init__(
        self,
        state: CoordinatorState,
        replicating: Replicating,
        saving: Saving,
        plan_change: PlanChange,
        restoring: Restoring,
    ) -> None:
        self.state = state
        self.replicating = replicating
        self.saving = saving
        self.plan_change = plan_change
        self.restoring = restoring

    def rank_attached(self, from_node: int, message: m.RankAttached) -> None:
        """Admit, refuse, or tell again what a repeated question wants to know."""
        state = self.state
        attach = message.attach
        back = attach.term is not None and state.phase == "running"
        if back and from_node in state.every_node:
            # Whoever comes back comes to a new keeper, also one that is denied here.
            self.replicating.copies_lost(f"the keeper of node {from_node} restarted")
        self._vacate(from_node, attach)
        refusal = state.admission.refusal(attach, self._in_the_way(attach))
        if refusal is not None:
            if not self._may_knock(attach):
                self._deny(from_node, attach, refusal)
            return
        state.knocking.clear()
        if attach.incarnation != state.incarnation:
            self._take_over(attach)
        state.known_term = max(state.known_term, message.term, state.admission.term)
        same = attach.nodes is state.nodes or attach.nodes == state.nodes
        if same:
            # The object that most ranks name: next time a glance will do.
            state.nodes = attach.nodes
        if not same or attach.nodes[attach.rank] != from_node:
            self._deny(from_node, attach, f"nodes differ: {state.nodes} and {attach.nodes}")
        elif state.phase == "gathering":
            self._gather(attach)
        elif state.phase in ("inventory", "deciding", "restoring"):
            self.restoring.want_inventory(from_node)
        elif state.phase == "running":
            self._rank_back(from_node, attach)
        elif state.phase in ("refused", "fenced"):
            self.restoring.tell_refusal(attach.rank)

    def _vacate(self, node: int, attach: m.TrainerAttached) -> None:
        """A keeper lets another launch in only when the holder's ranks there are gone."""
        state = self.state
        if state.incarnation is None or attach.incarnation.launch_id == state.incarnation.launch_id:
            return
        if state.admission.refusal(attach, []) is None:
            state.alive -= {rank for rank, here in enumerate(state.nodes) if here == node}

    def _may_knock(self, attach: m.TrainerAttached) -> bool:
        """Only the living stand in its way, and it has not waited long: no answer yet."""
        state = self.state
        if state.admission.refusal(attach, []) is not None:
            return False
        since = state.knocking.setdefault(attach.incarnation, state.now_s)
        return state.now_s - since < state.deadlines.knock_s

    def _in_the_way(self, attach: m.TrainerAttached) -> list[int]:
        """Ranks of another launch that hold the run; ranks of the same launch never count."""
        known = self.state.incarnation
        same = known is None or known.launch_id == attach.incarnation.launch_id
        return [] if same else self.reachable()

    def reachable(self) -> list[int]:
        """Ranks that hold the run, as far as this coordinator knows."""
        return sorted(
            r for r in self.state.alive if self.state.nodes[r] not in self.state.unreachable
        )

    def _deny(self, node: int, attach: m.TrainerAttached, reason: str) -> None:
        incarnation = attach.incarnation
        self.state.send(
            node, m.AttachRefused(incarnation=incarnation, rank=attach.rank, reason=reason)
        )

    def _take_over(self, attach: m.TrainerAttached) -> None:
        state = self.state
        state.held = self.restoring.same_term.held_term()
        state.reset()
        state.admission.admit(attach)
        state.nodes = attach.nodes
        state.every_node = tuple(sorted(set(attach.nodes)))
        state.go("gathering")

    def _gather(self, attach: m.TrainerAttached) -> None:
        state = self.state
        state.attaches[attach.rank] = attach
        state.alive.add(attach.rank)
        if attach.term is not None:
            state.rejoining = attach.term
        elif len(state.attaches) < state.world_size:
            return
        self.restoring.claim()

    def _rank_back(self, node: int, attach: m.TrainerAttached) -> None:
        """Its keeper restarted, or the start order was lost on the way."""
        state = self.state
        if attach.term is not None and attach.term != state.term:
            self._deny(node, attach, f"term {attach.term} is over, {state.term} runs")
            return
        state.alive.add(attach.rank)
        state.lost.discard(attach.rank)
        if attach.term is not None:
            self.restoring.rank_interrupted(attach.rank)
        state.send(node, self.restoring.opened(node))
        self.replicating.begin_round()

    def rank_lost(self, from_node: int, message: m.TrainerLost) -> None:
        """Before the start it ends the incarnation; later it asks for a breakpoint save."""
        state = self.state
        known = message.incarnation == state.incarnation and message.rank < state.world_size
        if not known or state.nodes[message.rank] != from_node:
            state.stale(message)
            return
        reason = f"rank {message.rank} {LOST}"
        fresh = message.rank in state.alive
        state.alive.discard(message.rank)
        if state.phase != "running":
            self.restoring.break_incarnation(f"{reason} before the run resumed")
        elif fresh:
            state.lost.add(message.rank)
            self.plan_change.drop_plan(reason)
            for save in list(state.saves.values()):
                if message.rank not in save.sealed:
                    self.saving.drop_memory(save, reason)
            self.saving.break_off(reason)

    def node_lost(self, event: m.NodeLost) -> None:
        """As if all its ranks were lost, until it comes back with their memory."""
        state = self.state
        if event.node not in state.nodes:
            return
        state.unreachable.add(event.node)
        reason = f"node {event.node} cannot be reached"
        if state.phase == "running":
            self.plan_change.drop_plan(reason)
            self.replicating.end_round(reason)
            state.emit(m.Report(kind="warning", detail=f"breakpoint save: {reason}"))
            self.saving.persist_newest()
        else:
            self.restoring.break_incarnation(f"{reason} before the run resumed")
