"""CoordinatorProtocol: the decisions that are made once for all ranks.

The role is played by the keeper of the lowest node index of an incarnation; every keeper owns one,
idle until a `RankAttached` reaches it.

Pure: `handle(event)` returns the instructions to carry out, in order.  Here is only the dispatch:
each concern is a part with a file of its own, and all parts share one `CoordinatorState`.  Theory
and the rules by number: docs/internals/protocol.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.attaching import Attaching
from autockpt.executors.protocol.coordinator.choosing import Choosing
from autockpt.executors.protocol.coordinator.plan_change import PlanChange
from autockpt.executors.protocol.coordinator.replicating import Replicating
from autockpt.executors.protocol.coordinator.restoring import Restoring
from autockpt.executors.protocol.coordinator.same_term import SameTerm
from autockpt.executors.protocol.coordinator.saving import Saving
from autockpt.executors.protocol.coordinator.state import CoordinatorState
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.values.goal import Retention


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorParts:
    """The class of each concern; the simulator swaps one to take a rule away."""

    state: type[CoordinatorState] = CoordinatorState
    replicating: type[Replicating] = Replicating
    saving: type[Saving] = Saving
    plan_change: type[PlanChange] = PlanChange
    choosing: type[Choosing] = Choosing
    same_term: type[SameTerm] = SameTerm
    restoring: type[Restoring] = Restoring
    attaching: type[Attaching] = Attaching


class CoordinatorProtocol:
    """One per keeper.  `handle` never raises on reordered, doubled or late events."""

    def __init__(
        self,
        *,
        retention: Retention | None = None,
        deadlines: Deadlines | None = None,
        parts: CoordinatorParts | None = None,
    ) -> None:
        """`retention`: which commits to keep; `deadlines`: how long to wait for an answer."""
        parts = parts or CoordinatorParts()
        self.state = state = parts.state(
            retention=retention or Retention(), deadlines=deadlines or Deadlines()
        )
        copies = self._replicating = parts.replicating(state)
        saving = self._saving = parts.saving(state, copies)
        plans = self._plan_change = parts.plan_change(state)
        restoring = parts.restoring(
            state, copies, saving, plans, parts.choosing(state), parts.same_term(state, saving)
        )
        self._restoring = restoring
        attaching = parts.attaching(state, copies, saving, plans, restoring)
        self._events: dict[type, Callable[[Any], None]] = {
            m.TermClaimed: restoring.term_claimed,
            m.TermRefused: restoring.term_refused,
            m.ClaimWithdrawn: restoring.claim_withdrawn,
            m.DecisionWritten: restoring.decision_written,
            m.DecisionFailed: restoring.decision_failed,
            m.GenerationVerified: restoring.generation_verified,
            m.OptimizerStateDropped: saving.optimizer_state_dropped,
            m.DirectoryRenewed: saving.directory_renewed,
            m.DirectoryGone: saving.directory_gone,
            m.CommitWritten: restoring.commit_written,
            m.CommitFailed: restoring.commit_failed,
            m.PlanProposed: plans.plan_proposed,
            m.NodeLost: attaching.node_lost,
            m.TimePassed: self._time_passed,
        }
        self._messages: dict[type, Callable[[int, Any], None]] = {
            m.RankAttached: attaching.rank_attached,
            m.TrainerLost: attaching.rank_lost,
            m.InventoryReported: restoring.inventory_reported,
            m.ShardVerified: restoring.rank_verified,
            m.ShardBad: restoring.rank_bad,
            m.RankBegan: saving.rank_began,
            m.RankSealed: saving.rank_sealed,
            m.RankPrepared: saving.rank_prepared,
            m.RankDropped: saving.rank_dropped,
            m.CopySealed: copies.copy_sealed,
            m.CopyComing: copies.copy_coming,
            m.CopyFailed: copies.copy_failed,
            m.Relayed: self._relayed,
        }
        self._relays: dict[type, Callable[[int, m.Relayed, Any], None]] = {
            m.BreakpointRequested: saving.breakpoint_relayed,
            m.PlanProposed: plans.plan_relayed,
            m.PlanPrepared: plans.plan_prepared,
            m.PlanLate: plans.plan_late,
        }

    def handle(self, event: m.CoordinatorEvent) -> list[m.CoordinatorInstruction]:
        """What to do now that `event` happened."""
        state = self.state
        state.out = []
        if isinstance(event, m.MessageReceived):
            on_message = self._messages.get(type(event.message))
            state.unreachable.discard(event.from_node)
            if on_message is not None:
                on_message(event.from_node, event.message)
                return state.out
        else:
            on_event = self._events.get(type(event))
            if on_event is not None:
                on_event(event)
                return state.out
        state.stale(event)
        return state.out

    def _relayed(self, from_node: int, message: m.Relayed) -> None:
        self._relays[type(message.event)](from_node, message, message.event)

    def settled_for(self, incarnation: m.Incarnation | None) -> bool:
        """The ranks of `incarnation` wait for no verdict from here."""
        return self.state.settled_for(incarnation)

    def _time_passed(self, event: m.TimePassed) -> None:
        """End each wait that is too long, repeat each message that may have been lost."""
        state = self.state
        state.now_s = max(state.now_s, event.now_s)
        if state.phase == "running":
            self._saving.expire_saves()
            self._replicating.expire_round()
            self._plan_change.expire_plan()
        else:
            self._restoring.expire_restore()
        if state.now_s - state.resent_s >= state.deadlines.resend_s:
            state.resent_s = state.now_s
            self._restoring.repeat_restore()
            if state.phase == "running":
                self._saving.repeat_saves()
                self._replicating.repeat_round()
                self._plan_change.repeat_plan()
