"""A plan change at a node: offers, promises and verdicts between trainers and coordinator."""

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.node.state import LocalRank, NodeState


class PlanChange:
    """At most one offer per trainer at a time."""

    def __init__(self, state: NodeState) -> None:
        self.state = state

    def plan_proposed(self, event: m.PlanProposed) -> None:
        """Hand the proposal to the coordinator."""
        state = self.state
        if state.incarnation is not None and state.phase == "open":
            state.relay(event)

    def plan_offered(self, message: m.PlanOffered) -> None:
        """Ask every local trainer; one that still holds an older plan asks about that first."""
        state = self.state
        if message.term != state.term or state.phase != "open":
            state.stale(message)
            return
        for local in state.ranks.values():
            if local.attach is None:
                continue
            if not local.alive:
                state.tell(m.TrainerLost(incarnation=local.attach.incarnation, rank=local.rank))
            elif local.plan_held is not None:
                state.relay(local.plan_held)
            elif message.version > max(state.plan_version, local.plan_offered):
                self._offer_plan(local, message)

    def _offer_plan(self, local: LocalRank, message: m.PlanOffered) -> None:
        local.plan_offered = message.version
        self.state.emit(
            m.PreparePlan(
                rank=local.rank,
                version=message.version,
                payload=message.payload,
                margin_steps=message.margin_steps,
            )
        )

    def plan_prepared(self, event: m.PlanPrepared) -> None:
        """The trainer holds; pass its step on, and repeat until there is a verdict."""
        state = self.state
        local = state.ranks.get(event.rank)
        if local is None or not local.alive or event.version != local.plan_offered:
            state.stale(event)
            return
        if event.version <= state.plan_version or local.plan_held is not None:
            state.stale(event)
            return
        local.plan_held = event
        state.relay(event)

    def plan_late(self, event: m.PlanLate) -> None:
        """The trainer broke its promise to hold; the coordinator says what now."""
        self.state.relay(event)

    def plan_decided(self, message: m.PlanDecided) -> None:
        """Every rank prepared it: pass the step on."""
        state = self.state
        older = message.version < state.plan_version
        known = (state.plan_version, state.plan_apply_step)
        if message.term != state.term or state.phase != "open" or older:
            state.stale(message)
            return
        if (message.version, message.apply_step) == known:
            return
        state.plan_version, state.plan_apply_step = message.version, message.apply_step
        for local in state.living():
            self._apply_plan(local)

    def _apply_plan(self, local: LocalRank) -> None:
        local.plan_held = None
        self.state.emit(
            m.ApplyPlan(
                rank=local.rank,
                version=self.state.plan_version,
                apply_step=self.state.plan_apply_step,
            )
        )

    def plan_dropped(self, message: m.PlanDropped) -> None:
        """It never applies: let the trainers go on."""
        state = self.state
        if message.term != state.term or message.version == state.plan_version:
            state.stale(message)
            return
        for local in state.living():
            offered = local.plan_offered == message.version
            if offered:
                local.plan_held, local.plan_offered = None, 0
            if offered or message.version >= m.STOP_VERSION:  # who asks for a stop waits for this
                abort = m.AbortPlan(rank=local.rank, version=message.version, reason=message.reason)
                state.emit(abort)

    def resume_held(self, local: LocalRank, attach: m.TrainerAttached) -> None:
        """Settle the plan that a trainer held when its keeper died."""
        if attach.plan_held and attach.plan_held == self.state.plan_version:
            self._apply_plan(local)
        elif attach.plan_held:
            reason = "the keeper restarted"
            self.state.emit(m.AbortPlan(rank=local.rank, version=attach.plan_held, reason=reason))
