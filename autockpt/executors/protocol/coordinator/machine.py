"""CoordinatorProtocol: what is decided once for all ranks.

The role is played by the keeper of the lowest node index of an incarnation; every keeper owns one,
idle until a `RankAttached` reaches it.  Three parts, one file each: `saving` (commits), `restoring`
(claim, choice, start) and `planning` (plan change), over the fields of `coordinator_state`.

Pure: `handle(event)` returns the instructions to carry out, in order.  Theory and the rules by
number: docs/protocol.md.
"""

from collections.abc import Callable
from typing import Any

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.plan_change import Planning
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.values.goal import Retention
from autockpt.values.telemetry import LOST


class CoordinatorProtocol(Planning):
    """One per keeper.  `handle` never raises on reordered, doubled or late events."""

    def __init__(
        self, *, retention: Retention | None = None, deadlines: Deadlines | None = None
    ) -> None:
        """`retention`: which commits to keep; `deadlines`: how long to wait for what."""
        super().__init__(retention=retention, deadlines=deadlines)
        self._events: dict[type, Callable[[Any], None]] = {
            m.TermClaimed: self.term_claimed,
            m.TermRefused: self.term_refused,
            m.DirectoryRenewed: self.directory_renewed,
            m.DirectoryGone: self.directory_gone,
            m.DecisionWritten: self.decision_written,
            m.DecisionFailed: self.decision_failed,
            m.CommitWritten: self.commit_written,
            m.CommitFailed: self.commit_failed,
            m.GenerationVerified: self.generation_verified,
            m.PlanProposed: self.plan_proposed,
            m.NodeLost: self.node_lost,
            m.TimePassed: self.time_passed,
        }
        self._messages: dict[type, Callable[[int, Any], None]] = {
            m.RankAttached: self.rank_attached,
            m.RankLost: self.rank_lost,
            m.InventoryReported: self.inventory_reported,
            m.RankBegan: self.rank_began,
            m.RankSealed: self.rank_sealed,
            m.RankPrepared: self.rank_prepared,
            m.CopySealed: self.copy_sealed,
            m.CopyComing: self.copy_coming,
            m.CopyFailed: self.copy_failed,
            m.RankDropped: self.rank_dropped,
            m.RankVerified: self.rank_verified,
            m.RankBad: self.rank_bad,
            m.BreakpointWanted: self.breakpoint_wanted,
            m.PlanWanted: self.plan_wanted,
            m.RankPlanPrepared: self.rank_plan_prepared,
            m.RankPlanLate: self.rank_plan_late,
        }

    def handle(self, event: m.CoordinatorEvent) -> list[m.CoordinatorInstruction]:
        """What to do now that `event` happened."""
        self._out = []
        if isinstance(event, m.MessageReceived):
            on_message = self._messages.get(type(event.message))
            self.unreachable.discard(event.from_node)
            if on_message is not None:
                on_message(event.from_node, event.message)
                return self._out
        else:
            on_event = self._events.get(type(event))
            if on_event is not None:
                on_event(event)
                return self._out
        self.stale(event)
        return self._out

    def rank_lost(self, from_node: int, message: m.RankLost) -> None:
        """Before the start it ends the incarnation; later it asks for a breakpoint save."""
        known = message.incarnation == self.incarnation and message.rank < self.world_size
        if not known or self.nodes[message.rank] != from_node:
            self.stale(message)
            return
        reason = f"rank {message.rank} {LOST}"
        fresh = message.rank in self.alive
        self.alive.discard(message.rank)
        if self.phase != "running":
            self.break_incarnation(f"{reason} before the run resumed")
        elif fresh:
            self.drop_plan(reason)
            for save in list(self.saves.values()):
                if message.rank not in save.sealed:
                    self.drop_memory(save, reason)
            self.break_off(reason)

    def node_lost(self, event: m.NodeLost) -> None:
        """As if all its ranks were lost, until it comes back with their memory."""
        if event.node not in self.nodes:
            return
        self.unreachable.add(event.node)
        reason = f"node {event.node} cannot be reached"
        if self.phase == "running":
            self.drop_plan(reason)
            self.end_round(reason)
            self.emit(m.Report(kind="warning", detail=f"breakpoint save: {reason}"))
            self.persist_newest()
        else:
            self.break_incarnation(f"{reason} before the run resumed")

    def time_passed(self, event: m.TimePassed) -> None:
        """End what waited too long, repeat what may have been lost."""
        self.now_s = max(self.now_s, event.now_s)
        if self.phase == "running":
            self.expire_saves()
            self.expire_round()
            self.expire_plan()
        else:
            self.expire_restore()
        if self.now_s - self.resent_s >= self.deadlines.resend_s:
            self.resent_s = self.now_s
            self.repeat_restore()
            if self.phase == "running":
                self.repeat_saves()
                self.repeat_round()
                self.repeat_plan()
