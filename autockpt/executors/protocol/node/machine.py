"""NodeProtocol: the decisions of one keeper, for the ranks on its node.

Trainers talk only to their keeper.  The keeper admits them, grants slots, counts seals and files,
and repeats to the coordinator each report that has no answer.  It never decides alone that
something is committed, restored or planned: those are the coordinator's verdicts.

Pure: `handle(event)` returns the instructions to carry out, in order.  Here is only the dispatch:
each concern is a part with a file of its own, and all parts share one `NodeState`.  Theory and the
rules by number: docs/internals/protocol.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.protocol.node.attaching import Attaching
from autockpt.executors.protocol.node.plan_change import PlanChange
from autockpt.executors.protocol.node.replica_slots import ReplicaSlots
from autockpt.executors.protocol.node.replicating import Replicating
from autockpt.executors.protocol.node.restoring import Restoring
from autockpt.executors.protocol.node.saving import Saving
from autockpt.executors.protocol.node.state import NodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """The class of each concern; the simulator swaps one to take a rule away."""

    replica_slots: type[ReplicaSlots] = ReplicaSlots
    replicating: type[Replicating] = Replicating
    saving: type[Saving] = Saving
    plan_change: type[PlanChange] = PlanChange
    restoring: type[Restoring] = Restoring
    attaching: type[Attaching] = Attaching


class NodeProtocol:
    """One per keeper.  `handle` never raises on reordered, doubled or late events."""

    def __init__(
        self, *, node: int = 0, deadlines: Deadlines | None = None, parts: NodeParts | None = None
    ) -> None:
        """`node`: index of this node, until an incarnation says otherwise."""
        parts = parts or NodeParts()
        self.state = state = NodeState(node=node, deadlines=deadlines or Deadlines())
        replicas = parts.replica_slots(state)
        replicating = parts.replicating(state, replicas)
        saving = parts.saving(state, replicas, replicating)
        plans = parts.plan_change(state)
        restoring = parts.restoring(state, replicas, saving, plans)
        attaching = parts.attaching(state, replicas, saving, restoring)
        self.saving, self.attaching = saving, attaching
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.TrainerAttached: attaching.trainer_attached,
            m.TrainerLost: attaching.trainer_lost,
            m.SlotsAdopted: attaching.slots_adopted,
            m.SlotsReplaced: attaching.slots_replaced,
            m.SlotsAdded: attaching.slots_added,
            m.AttachRefused: attaching.refused,
            m.RestoreRefused: attaching.refused,
            m.TermFenced: attaching.fenced,
            m.NodeLost: attaching.node_lost,
            m.SaveRequested: saving.save_requested,
            m.ShardSealed: saving.shard_sealed,
            m.ShardDiscarded: saving.shard_discarded,
            m.ShardPersisted: saving.shard_persisted,
            m.PersistFailed: saving.persist_failed,
            m.PersistStalled: saving.persist_stalled,
            m.BreakpointRequested: saving.breakpoint_requested,
            m.MemoryCommitted: saving.memory_committed,
            m.DurableCommitted: saving.durable_committed,
            m.GenerationDropped: saving.generation_dropped,
            m.PersistWanted: saving.persist_wanted,
            m.SlotsOutgrown: replicas.outgrown,
            m.ShardComing: replicas.shard_coming,
            m.CopiesWanted: replicating.copies_wanted,
            m.CopiesEnded: replicating.copies_ended,
            m.InventoryWanted: restoring.inventory_wanted,
            m.RestoreOrdered: restoring.restore_ordered,
            m.ShardsPlaced: restoring.shards_placed,
            m.ShardFetched: restoring.shard_fetched,
            m.FetchFailed: restoring.fetch_failed,
            m.ShardVerified: restoring.shard_verified,
            m.ShardBad: restoring.shard_bad,
            m.TermOpened: restoring.term_opened,
            m.PlanProposed: plans.plan_proposed,
            m.PlanOffered: plans.plan_offered,
            m.PlanPrepared: plans.plan_prepared,
            m.PlanLate: plans.plan_late,
            m.PlanDecided: plans.plan_decided,
            m.PlanDropped: plans.plan_dropped,
            m.TimePassed: self._time_passed,
        }

    def handle(self, event: m.NodeEvent) -> list[m.NodeInstruction]:
        """What to do now that `event` happened."""
        state = self.state
        state.out = []
        inner = event.message if isinstance(event, m.MessageReceived) else event
        handler = self._handlers.get(type(inner))
        if handler is None or self._is_of_replaced(event):
            state.stale(inner)
        else:
            handler(inner)
        return state.out

    def _is_of_replaced(self, event: m.NodeEvent) -> bool:
        """Another keeper sent it than the one that coordinates the trainers of this node.

        Most messages name an incarnation, or are of the term that runs.  Copies may be of its
        parent, which a former coordinator had copied as well.  Terms have the same number again
        where a directory was emptied.
        """
        return isinstance(event, m.MessageReceived) and event.from_node != self.state.coordinator

    def attach_refusal(self, event: m.TrainerAttached) -> str | None:
        """Return why a trainer would not be admitted now; None: it would."""
        return self.attaching.attach_refusal(event)

    def _time_passed(self, event: m.TimePassed) -> None:
        """Repeat all that has no answer."""
        state = self.state
        state.now_s = max(state.now_s, event.now_s)
        if state.now_s - state.resent_s < state.deadlines.resend_s:
            return
        state.resent_s = state.now_s
        self.attaching.repeat()
        self.saving.repeat()
