"""A plan change at the coordinator: a new plan applies at one step on all ranks, or never.

Phase one: every rank takes the plan, says where it stands and promises to wait before passing that
step plus the margin.  Phase two: with all answers, the switch is set to the greatest step plus the
margin.  By the promise, no rank has passed that step.  Until the last answer the proposal can be
dropped.
"""

import contextlib
from typing import Any

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.state import CoordinatorState, Proposal
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Retention
from autockpt.values.record import from_data
from autockpt.values.redundancy import Redundancy


class PlanChange:
    """At most one proposal at a time; the newest wins."""

    def __init__(self, state: CoordinatorState) -> None:
        self.state = state

    def plan_proposed(self, event: m.PlanProposed) -> None:
        """Delivered at the coordinator's own keeper."""
        self._propose(event.version, event.payload)

    def plan_relayed(self, from_node: int, message: m.Relayed, event: m.PlanProposed) -> None:
        """Delivered at another keeper."""
        if message.incarnation == self.state.incarnation:
            self.plan_proposed(event)

    def _propose(self, version: int, payload: dict[str, Any]) -> None:
        state = self.state
        if state.phase != "running" or version <= state.plan_newest:
            state.stale(f"plan {version}")
            return
        self.drop_plan(f"plan {version} is newer")
        state.plan_newest = version
        if len(state.alive) < state.world_size:
            state.emit(m.Report(kind="refused", detail=f"plan {version}: a rank is lost"))
            state.plan_verdicts[version] = None
            lost = m.PlanDropped(term=state.term, version=version, reason="a rank is lost")
            state.broadcast(lost)
            return
        state.proposal = Proposal(version=version, payload=payload, began_s=state.now_s)
        self._offer(state.proposal)

    def _offer(self, proposal: Proposal) -> None:
        state = self.state
        assert state.incarnation is not None
        waiting = set(range(state.world_size)) - set(proposal.prepared)
        for node in sorted({state.nodes[rank] for rank in waiting}):
            offer = m.PlanOffered(
                incarnation=state.incarnation,
                term=state.term,
                version=proposal.version,
                payload=proposal.payload,
                margin_steps=self._margin_steps(proposal.version),
            )
            state.send(node, offer)

    def _margin_steps(self, version: int) -> int:
        """Boundaries between the furthest rank and the switch; a stop has no time to lose."""
        return (
            m.STOP_MARGIN_STEPS
            if version >= m.STOP_VERSION
            else self.state.deadlines.plan_margin_steps
        )

    def plan_prepared(self, from_node: int, message: m.Relayed, event: m.PlanPrepared) -> None:
        """One more rank holds; the last answer decides."""
        state = self.state
        if message.term != state.term or state.phase != "running":
            state.stale(event)
            return
        proposal = state.proposal
        if proposal is None or event.version != proposal.version:
            self._answer_plan(from_node, event.version)
            return
        proposal.prepared.setdefault(event.rank, event.step)
        if self.all_prepared(proposal):
            self._decide_plan(proposal)

    def all_prepared(self, proposal: Proposal) -> bool:
        """Rule 13: the switch is set only when every rank has promised to wait for it."""
        return len(proposal.prepared) == self.state.world_size

    def _answer_plan(self, node: int, version: int) -> None:
        state = self.state
        apply_step = state.plan_verdicts.get(version)
        if apply_step is not None:
            decided = m.PlanDecided(term=state.term, version=version, apply_step=apply_step)
            state.send(node, decided)
        else:
            reason = "dropped before"
            state.send(node, m.PlanDropped(term=state.term, version=version, reason=reason))

    def _decide_plan(self, proposal: Proposal) -> None:
        margin_steps = self._margin_steps(proposal.version)
        apply_step = max(proposal.prepared.values()) + margin_steps
        payload, state = proposal.payload, self.state
        with contextlib.suppress(ConfigError):  # no rank takes a plan that it cannot read
            if "retention" in payload:  # a quota may hold fewer than the goal keeps
                state.retention = from_data(Retention, payload["retention"], where="plan change")
        with contextlib.suppress(ConfigError):
            if "redundancy" in payload:
                state.redundancy = from_data(Redundancy, payload["redundancy"], where="plan change")
        self._set_plan(proposal.version, apply_step)

    def _set_plan(self, version: int, apply_step: int) -> None:
        state = self.state
        state.proposal = None
        state.plan_verdicts[version] = apply_step
        state.broadcast(m.PlanDecided(term=state.term, version=version, apply_step=apply_step))

    def plan_late(self, from_node: int, message: m.Relayed, event: m.PlanLate) -> None:
        """A rank did not wait as promised: move the switch for all that have not made it yet."""
        state = self.state
        decided = state.plan_verdicts.get(event.version)
        if message.term != state.term or state.phase != "running" or decided is None:
            state.stale(event)
            return
        detail = f"rank {event.rank} passed step {event.step} before plan {event.version}"
        state.emit(m.Report(kind="violation", detail=detail))
        later = event.step + self._margin_steps(event.version)
        if later > decided:
            self._set_plan(event.version, later)

    def drop_plan(self, reason: str) -> None:
        """Withdraw the proposal; no rank has received a switch step, so no rank applies it."""
        state = self.state
        proposal, state.proposal = state.proposal, None
        if proposal is None:
            return
        state.plan_verdicts[proposal.version] = None
        state.broadcast(m.PlanDropped(term=state.term, version=proposal.version, reason=reason))

    def expire_plan(self) -> None:
        """Drop a proposal after this time, so that no rank is held longer."""
        state = self.state
        proposal = state.proposal
        if proposal is not None and state.now_s - proposal.began_s >= state.deadlines.plan_s:
            missing = sorted(set(range(state.world_size)) - set(proposal.prepared))
            self.drop_plan(f"ranks {missing} did not answer in {state.deadlines.plan_s:.0f} s")

    def repeat_plan(self) -> None:
        """Ask again the ranks that have not answered."""
        if self.state.proposal is not None:
            self._offer(self.state.proposal)
