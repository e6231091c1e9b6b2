"""The planning third of the coordinator: a new plan applies at one step on all ranks, or never.

Phase one: every rank takes the plan, says where it stands and promises to wait before passing that
step plus the margin.  Phase two: with all answers the switch is set to the greatest step plus the
margin, which by the promise nobody has passed.  Until the last answer the proposal can be dropped.
"""

import contextlib
from typing import Any

from autockpt.executors.protocol.coordinator.restoring import Restoring
from autockpt.executors.protocol.coordinator.state import Proposal
from autockpt.executors.protocol.messages import (
    STOP_MARGIN_STEPS,
    STOP_VERSION,
    PlanDecided,
    PlanDropped,
    PlanOffered,
    PlanProposed,
    PlanWanted,
    RankPlanLate,
    RankPlanPrepared,
    Report,
)
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Retention
from autockpt.values.record import from_data


class Planning(Restoring):
    """At most one proposal at a time; the newest wins."""

    def plan_proposed(self, event: PlanProposed) -> None:
        """Delivered at the coordinator's own keeper."""
        self._propose(event.version, event.payload)

    def plan_wanted(self, from_node: int, message: PlanWanted) -> None:
        """Delivered at another keeper."""
        if message.incarnation == self.incarnation:
            self._propose(message.version, message.payload)

    def _propose(self, version: int, payload: dict[str, Any]) -> None:
        if self.phase != "running" or version <= self.plan_newest:
            self.stale(f"plan {version}")
            return
        self.drop_plan(f"plan {version} is newer")
        self.plan_newest = version
        if len(self.alive) < self.world_size:
            self.emit(Report(kind="refused", detail=f"plan {version}: a rank is lost"))
            self.plan_verdicts[version] = None
            lost = PlanDropped(term=self.term, version=version, reason="a rank is lost")
            self.broadcast(lost)
            return
        self.proposal = Proposal(version=version, payload=payload, began_s=self.now_s)
        self._offer(self.proposal)

    def _offer(self, proposal: Proposal) -> None:
        assert self.incarnation is not None
        waiting = set(range(self.world_size)) - set(proposal.prepared)
        for node in sorted({self.nodes[rank] for rank in waiting}):
            offer = PlanOffered(
                incarnation=self.incarnation,
                term=self.term,
                version=proposal.version,
                payload=proposal.payload,
                margin_steps=self._margin_steps(proposal.version),
            )
            self.send(node, offer)

    def _margin_steps(self, version: int) -> int:
        """Boundaries between the furthest rank and the switch; a stop has no time to lose."""
        return STOP_MARGIN_STEPS if version >= STOP_VERSION else self.deadlines.plan_margin_steps

    def rank_plan_prepared(self, from_node: int, message: RankPlanPrepared) -> None:
        """One more rank holds; the last answer decides."""
        if message.term != self.term or self.phase != "running":
            self.stale(message)
            return
        proposal = self.proposal
        if proposal is None or message.version != proposal.version:
            self._answer_plan(from_node, message.version)
            return
        proposal.prepared.setdefault(message.rank, message.step)
        if self.all_prepared(proposal):
            self._decide_plan(proposal)

    def all_prepared(self, proposal: Proposal) -> bool:
        """Rule 13: the switch is set only when every rank has promised to wait for it."""
        return len(proposal.prepared) == self.world_size

    def _answer_plan(self, node: int, version: int) -> None:
        apply_step = self.plan_verdicts.get(version)
        if apply_step is not None:
            decided = PlanDecided(term=self.term, version=version, apply_step=apply_step)
            self.send(node, decided)
        else:
            reason = "dropped before"
            self.send(node, PlanDropped(term=self.term, version=version, reason=reason))

    def _decide_plan(self, proposal: Proposal) -> None:
        margin_steps = self._margin_steps(proposal.version)
        apply_step = max(proposal.prepared.values()) + margin_steps
        if "retention" in proposal.payload:  # a quota may hold fewer than the goal keeps
            with contextlib.suppress(ConfigError):  # no rank takes a plan that it cannot read
                self.retention = from_data(
                    Retention, proposal.payload["retention"], where="plan change"
                )
        self._set_plan(proposal.version, apply_step)

    def _set_plan(self, version: int, apply_step: int) -> None:
        self.proposal = None
        self.plan_verdicts[version] = apply_step
        self.broadcast(PlanDecided(term=self.term, version=version, apply_step=apply_step))

    def rank_plan_late(self, from_node: int, message: RankPlanLate) -> None:
        """A rank did not wait as promised: move the switch for all that have not made it yet."""
        decided = self.plan_verdicts.get(message.version)
        if message.term != self.term or self.phase != "running" or decided is None:
            self.stale(message)
            return
        detail = f"rank {message.rank} passed step {message.step} before plan {message.version}"
        self.emit(Report(kind="violation", detail=detail))
        later = message.step + self._margin_steps(message.version)
        if later > decided:
            self._set_plan(message.version, later)

    def drop_plan(self, reason: str) -> None:
        """Withdraw the proposal; nobody has heard a switch step, so nobody applies it."""
        proposal, self.proposal = self.proposal, None
        if proposal is None:
            return
        self.plan_verdicts[proposal.version] = None
        self.broadcast(PlanDropped(term=self.term, version=proposal.version, reason=reason))

    def rank_interrupted(self, rank: int) -> None:
        """Its keeper also forgot what the rank promised."""
        super().rank_interrupted(rank)
        self.drop_plan(f"rank {rank} came back to a new keeper")

    def expire_plan(self) -> None:
        """Nobody is held longer than this."""
        proposal = self.proposal
        if proposal is not None and self.now_s - proposal.began_s >= self.deadlines.plan_s:
            missing = sorted(set(range(self.world_size)) - set(proposal.prepared))
            self.drop_plan(f"ranks {missing} did not answer in {self.deadlines.plan_s:.0f} s")

    def repeat_plan(self) -> None:
        """Ask again whoever has not answered."""
        if self.proposal is not None:
            self._offer(self.proposal)
